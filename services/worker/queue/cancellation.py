"""Cancelled jobs end here, wherever in this worker they are.

Whether this or their completion comes first is settled by the fenced write: the other changes nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from services.process import telemetry
from services.worker.in_flight import Held
from services.worker.jobs import Job, Outcome, Phase, cancelled
from services.worker.store.cancellations import CancellationStore
from services.worker.store.persistence import Persistence

FORGET_EVERY_S = 3600.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Reach:
    """How a job is stopped and ended: forget it wherever it is, pages and all, and take its outcome."""

    drop: Callable[[Collection[Job]], None]
    finish: Callable[[Outcome], None]


class Cancellations:
    """Looks again and again among the jobs that are held, and screens those that come back from being parked."""

    def __init__(
        self,
        store: CancellationStore,
        persistence: Persistence,
        held: Held,
        reach: Reach,
        poll_s: float,
        keep: timedelta,
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._held = held
        self._reach = reach
        self._poll_s = poll_s
        self._keep = keep
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Somebody cancelled something, somewhere."""
        self._wake.set()

    async def screen(self, jobs: Sequence[Job]) -> list[Job]:
        """End those that were cancelled; returns the others that are still here and wait."""
        await self._end(jobs)
        return [job for job in jobs if job.phase is Phase.WAITING]

    async def run(self) -> None:
        """Look among the held jobs, for ever."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._end([job for job in self._held if job.phase is not Phase.COMPLETING])

    async def _end(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        found = await self._persistence.insist(partial(self._store.among, [job.key for job in jobs]))
        ended = [job for job in jobs if job.key in found and job.phase is not Phase.COMPLETING]
        if not ended:
            return
        self._reach.drop(ended)
        for job in ended:
            self._reach.finish(cancelled(job))
        _log.info("Jobs cancelled", action="jobs_cancelled", jobs=len(ended))

    async def forget_often(self) -> None:
        """Delete old cancellations, for ever."""
        while True:
            await self._persistence.insist(partial(self._store.forget, self._keep))
            await asyncio.sleep(FORGET_EVERY_S)
