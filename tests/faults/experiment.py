"""The registry of experiments by row of the fault table, and how one run is judged."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from services.errors import ServiceError
from tests.faults.checker import Figures, check, figures
from tests.faults.run import Run, open_run
from tests.faults.stack import Stack

RUN_TIMEOUT_S = 300.0
MAX_PROBLEMS = 5

Body = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Experiment:
    """A row of the table: the fault, and what must be observed. `settings` apply to every process of the run."""

    row: str
    fault: str
    expected: str
    body: Body
    settings: dict[str, Any]
    jobs: int
    timeout_s: float
    extra: bool
    checked: bool
    alone: bool


@dataclass(frozen=True)
class Verdict:
    """The result of one run."""

    row: str
    seed: int
    figures: Figures
    seconds: float
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    row: str,
    fault: str,
    expected: str,
    *,
    jobs: int = 500,
    timeout_s: float = RUN_TIMEOUT_S,
    extra: bool = False,
    checked: bool = True,
    alone: bool = False,
    **settings: Any,
) -> Callable[[Body], Body]:
    """Register a body as that row. `extra` rows run only when named; rows that are not `checked` judge themselves.

    A row that kills a server of the stack or measures time runs `alone`; the others may share the stack.
    """

    def register(body: Body) -> Body:
        assert row not in EXPERIMENTS, f"row {row} is registered twice"
        EXPERIMENTS[row] = Experiment(row, fault, expected, body, settings, jobs, timeout_s, extra, checked, alone)
        return body

    return register


async def run_or_fail(stack: Stack, which: Experiment, seed: int, jobs: int | None = None) -> Verdict:
    """Like `run_experiment`, but an unexpected exception fails this run only; the other runs continue."""
    started = time.monotonic()
    try:
        return await run_experiment(stack, which, seed, jobs)
    except Exception as error:
        problem = f"the run raised {type(error).__name__}: {error}"
        return Verdict(which.row, seed, Figures(0, 0, 0, 0, 0), time.monotonic() - started, (problem,))


async def run_experiment(
    stack: Stack, which: Experiment, seed: int, jobs: int | None = None, **switches: Any
) -> Verdict:
    """Run an experiment once, from fresh tables and topics to the checker's verdict."""
    started = time.monotonic()
    async with open_run(stack, f"row{which.row}", seed, jobs or which.jobs, **which.settings | switches) as run:
        try:
            async with asyncio.timeout(which.timeout_s):
                await which.body(run)
        except (AssertionError, TimeoutError, ServiceError, OSError) as error:
            run.problems.append(str(error) or f"{type(error).__name__} after {time.monotonic() - started:.0f} s")
        snapshot = await run.snapshot()
        if which.checked:
            run.expect(
                run.watch.polls > 0, f"the watch observed no committed offset during the run: {run.watch.last_error}"
            )
            run.problems += [str(violation) for violation in check(snapshot)]
        seconds = time.monotonic() - started
        return Verdict(which.row, seed, figures(snapshot), seconds, tuple(run.problems), tuple(run.notes))
