"""The product with a defect, in the experiment that brings it out."""

from tests.faults.experiment import EXPERIMENTS, Verdict, carry_out
from tests.faults.stack import Stack

SHOWN_BY = {
    "offset_before_commit": "2",
    "no_fence": "6",
    "new_webhook_id_per_attempt": "5",
    "row_without_outbox": "4",
    "result_changed": "4",
    "lost_job": "4",
    "webhook_before_row": "5",
}


async def caught(stack: Stack, mutant: str, jobs: int | None = None) -> Verdict:
    """The verdict over a run of the mutant; its problems should not be empty."""
    return await carry_out(stack, EXPERIMENTS[SHOWN_BY[mutant]], 2, jobs, mutant=mutant)
