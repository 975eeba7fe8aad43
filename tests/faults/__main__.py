"""`make faults`: run experiments, print the table, and write docs/reliability.md once every row has all its seeds."""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import report
from tests.faults.experiment import EXPERIMENTS, Experiment, Verdict, run_or_fail
from tests.faults.experiments import load
from tests.faults.mutant_runs import run_mutant
from tests.faults.mutants import MUTANTS
from tests.faults.stack import Stack, populate_template, running_stack

AT_ONCE = 3


def selected_experiments(names: str) -> list[Experiment]:
    """The experiments in a comma-separated list; without a list, all but the extras. Exits on an unknown name."""
    if not names:
        return [each for each in EXPERIMENTS.values() if not each.extra]
    unknown = [name for name in names.split(",") if name not in EXPERIMENTS]
    if unknown:
        sys.exit(f"faults: unknown experiment {', '.join(unknown)}; known experiments: {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in names.split(",")]


async def run_all(stack: Stack, experiments: list[Experiment], how: argparse.Namespace) -> list[Verdict]:
    """Run every experiment with every seed; print and store each verdict as it arrives.

    Seeds are the outer loop, so an interrupted session has covered every row. For each seed, the runs that can share
    the stack go in parallel, then the others one at a time.
    """
    await populate_template(stack)
    gate = asyncio.Semaphore(how.at_once)

    async def one(each: Experiment, seed: int) -> Verdict:
        async with gate:
            verdict = await run_or_fail(stack, each, seed, how.jobs)
        if how.jobs is None:  # a run of another size is not evidence
            report.store_verdict(verdict)
        print(report.format_verdict(each.row, verdict), flush=True)
        return verdict

    verdicts: list[Verdict] = []
    for seed in range(how.first_seed, how.first_seed + how.seeds):
        due = [each for each in experiments if seed == how.first_seed or not each.extra]
        verdicts += await asyncio.gather(*(one(each, seed) for each in due if not each.alone))
        verdicts += [await one(each, seed) for each in due if each.alone]
    order = [each.row for each in experiments]
    return sorted(verdicts, key=lambda verdict: (order.index(verdict.row), verdict.seed))


async def run_mutants(stack: Stack, jobs: int | None) -> dict[str, str]:
    """Run every mutant; returns by name which promises the checker found broken."""
    await populate_template(stack)
    outcomes: dict[str, str] = {}
    for name in MUTANTS:
        verdict = await run_mutant(stack, name, jobs)
        promises = sorted({problem[:2] for problem in verdict.problems if problem[:1] == "P" and problem[2:3] == ":"})
        outcomes[name] = f"caught, {', '.join(promises)} broken" if promises else "**not caught**"
        if jobs is None:
            report.store_mutant(name, outcomes[name])
        print(f"{name}: {outcomes[name]} ({verdict.seconds:.1f} s)", flush=True)
    return outcomes


def main() -> None:
    """Exit status 1 if any run had a problem, or if a mutant was not caught."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--faults", default="", help="comma-separated rows; default: all but the extras")
    parser.add_argument("--seeds", type=int, default=report.SEEDS)
    parser.add_argument("--first-seed", type=int, default=1, help="first seed, to resume an interrupted session")
    parser.add_argument("--jobs", type=int, default=None, help="jobs per run, instead of each experiment's own number")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="number of runs in parallel")
    parser.add_argument("--mutants", action="store_true", help="run the mutants instead of the experiments")
    arguments = parser.parse_args()
    load()
    experiments = [] if arguments.mutants else selected_experiments(arguments.faults)
    for library in ("aiokafka", "asyncpg"):  # the harness polls servers while they are down
        logging.getLogger(library).setLevel(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="loraq-faults-"))
    started = time.monotonic()
    with running_stack(directory) as stack:
        mutants = asyncio.run(run_mutants(stack, arguments.jobs)) if arguments.mutants else {}
        verdicts = asyncio.run(run_all(stack, experiments, arguments)) if experiments else []
        versions = report.versions(stack)
    rows = report.summarize(verdicts)
    print(f"\n{report.table(rows)}\n\n{time.monotonic() - started:.0f} s; logs in {directory}")
    if arguments.jobs is None:
        print(report.write(versions))
    sys.exit(any(row.problems for row in rows) or any("not caught" in outcome for outcome in mutants.values()))


if __name__ == "__main__":
    main()
