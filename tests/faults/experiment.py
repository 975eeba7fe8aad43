"""Experiments by the row of the fault table that they are, and how one run of one is judged."""

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
    """A row of the table: what goes wrong, and what must be seen. `settings` are those of every process of it."""

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
    """What came of one run."""

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
    """Register a body as that row. `extra` ones run only when named; those not `checked` judge themselves.

    One that ends a server of the stack, or measures times, runs `alone`; others may share the stack.
    """

    def register(body: Body) -> Body:
        assert row not in EXPERIMENTS, f"row {row} is there twice"
        EXPERIMENTS[row] = Experiment(row, fault, expected, body, settings, jobs, timeout_s, extra, checked, alone)
        return body

    return register


async def attempted(stack: Stack, which: Experiment, seed: int, jobs: int | None = None) -> Verdict:
    """`carry_out`, except that a run which cannot be carried out is one that failed: the others go on."""
    begun = time.monotonic()
    try:
        return await carry_out(stack, which, seed, jobs)
    except Exception as error:
        problem = f"the run broke: {type(error).__name__}: {error}"
        return Verdict(which.row, seed, Figures(0, 0, 0, 0, 0), time.monotonic() - begun, (problem,))


async def carry_out(stack: Stack, which: Experiment, seed: int, jobs: int | None = None, **switches: Any) -> Verdict:
    """One run, from fresh tables and topics to the checker's verdict."""
    begun = time.monotonic()
    async with open_run(stack, f"row{which.row}", seed, jobs or which.jobs, **which.settings | switches) as run:
        try:
            async with asyncio.timeout(which.timeout_s):
                await which.body(run)
        except (AssertionError, TimeoutError, ServiceError, OSError) as error:
            run.problems.append(str(error) or f"{type(error).__name__} after {time.monotonic() - begun:.0f} s")
        snapshot = await run.snapshot()
        if which.checked:
            run.expect(run.watch.looks > 0, f"nobody saw an offset move while it ran: {run.watch.trouble}")
            run.problems += [str(violation) for violation in check(snapshot)]
        seconds = time.monotonic() - begun
        return Verdict(which.row, seed, figures(snapshot), seconds, tuple(run.problems), tuple(run.notes))
