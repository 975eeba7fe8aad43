"""Before a partition may go to another worker: jobs of it that run may end, within a budget."""

import asyncio

from services.process import telemetry
from services.worker.in_flight import InFlight
from services.worker.jobs import Job
from services.worker.offsets.ledger import Partition

LOOK_EVERY_S = 0.05
_log = telemetry.get_logger()


class Handover:
    """The group waits meanwhile, so the budget is small; heartbeats go on.

    What has not ended by then keeps its lease and ends here: whoever gets its record waits for it. Jobs that only wait
    are released once it is known that their partition went.
    """

    def __init__(self, in_flight: InFlight, budget_s: float) -> None:
        self._in_flight = in_flight
        self._budget_s = budget_s

    async def drained(self, partitions: frozenset[Partition]) -> None:
        """Return when the jobs that ran of these partitions have ended, or the budget is spent."""
        running = self._in_flight.running_in(partitions)
        try:
            async with asyncio.timeout(self._budget_s):
                while self._left(running):  # noqa: ASYNC110  # within the budget; every settled job would wake an event
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            left = self._left(running)
            unready = {place.partition for job in left for place in job.places} & partitions
            _log.info("Jobs still run", action="revoke_budget_spent", jobs=len(left), partitions=len(unready))

    def _left(self, jobs: list[Job]) -> list[Job]:
        return [job for job in jobs if self._in_flight.get(job.key) is job]
