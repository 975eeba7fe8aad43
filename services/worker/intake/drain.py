"""Lets running jobs of a revoked partition finish before another worker gets it, within a time budget."""

import asyncio

from services.process import telemetry
from services.worker.in_flight import InFlight
from services.worker.jobs import Job
from services.worker.offsets.ledger import Partition

LOOK_EVERY_S = 0.05
_log = telemetry.get_logger()


class PartitionDrain:
    """Waits for running jobs. The rebalance waits meanwhile, so the budget is small; heartbeats continue.

    A job that is still running afterwards keeps its lease and finishes here; the worker that gets its record waits for
    that. Waiting jobs are released once their partition is assigned to another worker.
    """

    def __init__(self, in_flight: InFlight, budget_s: float) -> None:
        self._in_flight = in_flight
        self._budget_s = budget_s

    async def drained(self, partitions: frozenset[Partition]) -> None:
        """Wait until the running jobs of these partitions have ended, or the budget is spent."""
        running = self._in_flight.running_in(partitions)
        try:
            async with asyncio.timeout(self._budget_s):
                while self._left(running):  # noqa: ASYNC110  # bounded; an event would be set by every settled job
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            left = self._left(running)
            unready = {place.partition for job in left for place in job.places} & partitions
            _log.info(
                "Jobs still run",
                action="revoke_budget_spent",
                jobs=len(left),
                partitions=len(unready),
            )

    def _left(self, jobs: list[Job]) -> list[Job]:
        return [job for job in jobs if self._in_flight.get(job.key) is job]
