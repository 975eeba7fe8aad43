"""Running jobs of revoked partitions get a time budget to finish."""

import asyncio
import time

from services.worker.in_flight import InFlight
from services.worker.intake.drain import PartitionDrain
from services.worker.jobs import Phase
from services.worker.offsets.ledger import Place
from tests.services.worker.test_in_flight import P, Q, in_flight_with, job

LONG_S = 30.0


async def test_it_waits_only_for_running_jobs_of_the_partitions() -> None:
    running, waiting, elsewhere = job(Place(P, 0)), job(Place(P, 1)), job(Place(Q, 0))
    running.phase = elsewhere.phase = Phase.RUNNING
    in_flight = in_flight_with(running, waiting, elsewhere)
    draining = asyncio.create_task(PartitionDrain(in_flight, LONG_S).drained(frozenset({P})))
    await asyncio.sleep(0)
    assert not draining.done()
    in_flight.remove(running)
    await asyncio.wait_for(draining, LONG_S / 2)


async def test_the_budget_bounds_the_wait() -> None:
    running = job(Place(P, 0))
    running.phase = Phase.RUNNING
    began = time.monotonic()
    await PartitionDrain(in_flight_with(running), 0.1).drained(frozenset({P}))
    assert 0.1 <= time.monotonic() - began < LONG_S / 2


async def test_without_running_jobs_it_does_not_wait() -> None:
    await PartitionDrain(InFlight(), 0.0).drained(frozenset({P}))
