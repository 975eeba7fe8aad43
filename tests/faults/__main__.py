"""`make faults`: runs experiments, prints the table, writes docs/reliability.md once every row has all its seeds."""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import report
from tests.faults.experiment import EXPERIMENTS, Experiment, Verdict, attempted
from tests.faults.experiments import load
from tests.faults.mutant_runs import caught
from tests.faults.mutants import MUTANTS
from tests.faults.stack import Stack, furnish, running_stack

AT_ONCE = 3


def chosen(names: str) -> list[Experiment]:
    """The experiments of a comma-separated list; all that are not extras if it is empty. Exits on an unknown name."""
    if not names:
        return [each for each in EXPERIMENTS.values() if not each.extra]
    unknown = [name for name in names.split(",") if name not in EXPERIMENTS]
    if unknown:
        sys.exit(f"faults: there is no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in names.split(",")]


async def run_all(stack: Stack, experiments: list[Experiment], how: argparse.Namespace) -> list[Verdict]:
    """Every experiment with every seed, told and remembered as it goes.

    Seed by seed, so that a session that is cut short has seen every row; of one seed some runs go side by side, then
    those that need the stack alone.
    """
    await furnish(stack)
    gate = asyncio.Semaphore(how.at_once)

    async def one(each: Experiment, seed: int) -> Verdict:
        async with gate:
            verdict = await attempted(stack, each, seed, how.jobs)
        if how.jobs is None:  # a smaller run is a try, not evidence
            report.remember(verdict)
        print(report.line(each.row, verdict), flush=True)
        return verdict

    verdicts: list[Verdict] = []
    for seed in range(how.first_seed, how.first_seed + how.seeds):
        due = [each for each in experiments if seed == how.first_seed or not each.extra]
        verdicts += await asyncio.gather(*(one(each, seed) for each in due if not each.alone))
        verdicts += [await one(each, seed) for each in due if each.alone]
    order = [each.row for each in experiments]
    return sorted(verdicts, key=lambda verdict: (order.index(verdict.row), verdict.seed))


async def run_mutants(stack: Stack, jobs: int | None) -> dict[str, str]:
    """Every defect, and which promises the checker saw broken."""
    await furnish(stack)
    said: dict[str, str] = {}
    for name in MUTANTS:
        verdict = await caught(stack, name, jobs)
        promises = sorted({problem[:2] for problem in verdict.problems if problem[:1] == "P" and problem[2:3] == ":"})
        said[name] = f"caught, {', '.join(promises)} broken" if promises else "**not caught**"
        if jobs is None:
            report.remember_mutant(name, said[name])
        print(f"{name}: {said[name]} ({verdict.seconds:.1f} s)", flush=True)
    return said


def main() -> None:
    """Exit status 1 if any run had a problem, or if a mutant was not caught."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--faults", default="", help="rows, separated by commas; all by default")
    parser.add_argument("--seeds", type=int, default=report.SEEDS)
    parser.add_argument("--first-seed", type=int, default=1, help="to go on where a session was cut short")
    parser.add_argument("--jobs", type=int, default=None, help="jobs a run, instead of each experiment's own number")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="runs side by side")
    parser.add_argument("--mutants", action="store_true", help="run the product with defects instead")
    arguments = parser.parse_args()
    load()
    experiments = [] if arguments.mutants else chosen(arguments.faults)
    for library in ("aiokafka", "asyncpg"):  # the harness looks at servers that are away, as it should
        logging.getLogger(library).setLevel(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="loraq-faults-"))
    begun = time.monotonic()
    with running_stack(directory) as stack:
        mutants = asyncio.run(run_mutants(stack, arguments.jobs)) if arguments.mutants else {}
        verdicts = asyncio.run(run_all(stack, experiments, arguments)) if experiments else []
        versions = report.versions(stack)
    rows = report.summed(verdicts)
    print(f"\n{report.table(rows)}\n\n{time.monotonic() - begun:.0f} s; logs in {directory}")
    if arguments.jobs is None:
        print(report.write(versions))
    sys.exit(any(row.problems for row in rows) or any("not caught" in said for said in mutants.values()))


if __name__ == "__main__":
    main()
