"""A worker without progress ends itself, unless the broker is unreachable."""

import asyncio

import pytest

from services.errors import RetryableError
from services.process.watchdog import Part
from services.worker.supervision.progress import StuckError, watch_progress
from tests.waiting import eventually

LIMIT_S = 0.2


async def reachable() -> None: ...


async def test_a_stuck_part_is_named() -> None:
    parts = {"polling": Part(True, 7), "partition jobs/0": Part(False, 3)}
    with pytest.raises(StuckError, match=r"^polling: no progress for .* \(LORAQ_PROGRESS_TIMEOUT_S\)"):
        await watch_progress(lambda: parts, reachable, LIMIT_S)


async def test_nothing_is_stuck_while_the_broker_is_unreachable() -> None:
    checks = 0

    async def unreachable() -> None:
        nonlocal checks
        checks += 1
        raise RetryableError("no broker answers")

    watching = asyncio.create_task(watch_progress(lambda: {"polling": Part(True, 7)}, unreachable, LIMIT_S))
    await eventually(lambda: checks >= 2, what="two checks of the broker")
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
