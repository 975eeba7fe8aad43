"""Ends cancelled jobs at every stage in this worker.

If a job completes at the same time, the first fenced write wins and the other has no effect.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from services.process import telemetry
from services.worker.in_flight import InFlight
from services.worker.jobs import Job, Outcome, Phase, cancelled
from services.worker.store.cancellations import CancellationStore
from services.worker.store.persistence import Persistence

DELETE_EVERY_S = 3600.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class CancellationCallbacks:
    """`drop` removes jobs from the backlog and the engine; `finish` accepts an outcome."""

    drop: Callable[[Collection[Job]], None]
    finish: Callable[[Outcome], None]


class Cancellations:
    """Polls for cancellations of jobs in flight, and screens jobs that return from parking."""

    def __init__(
        self,
        store: CancellationStore,
        persistence: Persistence,
        in_flight: InFlight,
        callbacks: CancellationCallbacks,
        poll_s: float,
        keep: timedelta,
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._in_flight = in_flight
        self._callbacks = callbacks
        self._poll_s = poll_s
        self._keep = keep
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Check immediately: a cancellation was requested."""
        self._wake.set()

    async def screen(self, jobs: Sequence[Job]) -> list[Job]:
        """End the cancelled jobs; returns the others that still wait."""
        await self._end(jobs)
        return [job for job in jobs if job.phase is Phase.WAITING]

    async def run(self) -> None:
        """Check the jobs in flight until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._end([job for job in self._in_flight if job.phase is not Phase.COMPLETING])

    async def _end(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        found = await self._persistence.retry_until_done(
            partial(self._store.requested_among, [job.key for job in jobs])
        )
        ended = [job for job in jobs if job.key in found and job.phase is not Phase.COMPLETING]
        if not ended:
            return
        self._callbacks.drop(ended)
        for job in ended:
            self._callbacks.finish(cancelled(job))
        _log.info("Jobs cancelled", action="jobs_cancelled", jobs=len(ended))

    async def delete_old(self) -> None:
        """Delete old cancellation requests periodically, until cancelled."""
        while True:
            await self._persistence.retry_until_done(partial(self._store.delete_older_than, self._keep))
            await asyncio.sleep(DELETE_EVERY_S)
