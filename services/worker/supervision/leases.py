"""Keeps what this worker holds its own: renews leases, and lets go of what belongs to another worker."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from services.process import telemetry
from services.worker.execution.runner import Runner
from services.worker.in_flight import InFlight
from services.worker.intake.acceptor import Acceptor
from services.worker.jobs import Job, Phase
from services.worker.offsets.ledger import Ledger
from services.worker.store.jobs import JobStore
from services.worker.store.persistence import Persistence

RENEWALS_PER_LEASE = 3
_log = telemetry.get_logger()


class LeaseKeeper:
    """One loop beside the others. `settled` says that no rebalance is under way."""

    def __init__(
        self,
        store: JobStore,
        persistence: Persistence,
        ledger: Ledger,
        in_flight: InFlight,
        runner: Runner,
        acceptor: Acceptor,
        lease_s: float,
        settled: Callable[[], bool],
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._ledger = ledger
        self._in_flight = in_flight
        self._runner = runner
        self._acceptor = acceptor
        self._every_s = lease_s / RENEWALS_PER_LEASE
        self._settled = settled
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """The assignment changed: look for jobs that are another worker's now."""
        self._hurry.set()

    async def run(self) -> None:
        """Release strays and renew the rest, for ever."""
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            if self._settled():
                await self.release(self._in_flight.reassigned(self._ledger.partitions))
            await self._renew()

    async def release(self, jobs: Sequence[Job]) -> None:
        """Give jobs up, so that the worker that has their records now may take them at once."""
        if not jobs:
            return
        self._runner.drop(jobs)
        for job in jobs:
            self._in_flight.remove(job)
        await self._persistence.retry_until_done(partial(self._store.release, jobs))
        _log.info("Jobs released", action="jobs_released", jobs=len(jobs))

    async def _renew(self) -> None:
        jobs = [job for job in self._in_flight if job.phase is not Phase.COMPLETING]
        if not jobs:
            return
        ours = await self._persistence.retry_until_done(partial(self._store.renew, jobs))
        for job in jobs:
            if job.key not in ours and job.phase is not Phase.COMPLETING and self._in_flight.get(job.key) is job:
                self.surrender(job)

    def surrender(self, job: Job) -> None:
        """Another worker has a newer fence: stop the job here, and ask the database again about its records."""
        telemetry.STALE_WRITES.inc()
        self._runner.drop([job])
        self._in_flight.remove(job)
        self._acceptor.recheck(job)
