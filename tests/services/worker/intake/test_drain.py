"""Jobs that run of partitions that may go: they have their budget, and no more."""

import asyncio
import time

from services.worker.in_flight import InFlight
from services.worker.intake.drain import PartitionDrain
from services.worker.jobs import Phase
from services.worker.offsets.ledger import Place
from tests.services.worker.test_in_flight import P, Q, in_flight_with, job

LONG_S = 30.0


async def test_it_waits_for_what_runs_there_and_for_nothing_else() -> None:
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


async def test_where_nothing_runs_nobody_waits() -> None:
    await PartitionDrain(InFlight(), 0.0).drained(frozenset({P}))
