"""Run the product with a defect, in the experiment that exposes it."""

from tests.faults.experiment import EXPERIMENTS, Verdict, run_experiment
from tests.faults.stack import Stack

EXPERIMENT_OF = {
    "offset_before_commit": "2",
    "no_fence": "6",
    "new_webhook_id_per_attempt": "5",
    "row_without_outbox": "4",
    "result_changed": "4",
    "lost_job": "4",
    "webhook_before_row": "5",
}


async def run_mutant(stack: Stack, mutant: str, jobs: int | None = None) -> Verdict:
    """The verdict on a run of the mutant; its problems should not be empty."""
    return await run_experiment(stack, EXPERIMENTS[EXPERIMENT_OF[mutant]], 2, jobs, mutant=mutant)
