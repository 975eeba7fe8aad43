"""A worker that stands still ends itself, unless it is the broker that is away."""

import asyncio

import pytest

from services.errors import RetryableError
from services.process.watchdog import Part
from services.worker.supervision.progress import StuckError, watch_progress
from tests.waiting import eventually

LIMIT_S = 0.2


async def reachable() -> None: ...


async def test_what_stands_still_is_named() -> None:
    parts = {"polling": Part(True, 7), "partition jobs/0": Part(False, 3)}
    with pytest.raises(StuckError, match=r"^polling: no progress for .* \(LORAQ_PROGRESS_TIMEOUT_S\)"):
        await watch_progress(lambda: parts, reachable, LIMIT_S)


async def test_while_the_broker_is_away_nothing_is_to_blame() -> None:
    asked = 0

    async def away() -> None:
        nonlocal asked
        asked += 1
        raise RetryableError("no broker answers")

    watching = asyncio.create_task(watch_progress(lambda: {"polling": Part(True, 7)}, away, LIMIT_S))
    await eventually(lambda: asked >= 2, what="it to ask twice")
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
