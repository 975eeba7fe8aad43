"""Renews the leases of jobs in flight, and releases jobs that another worker owns."""

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
    """One loop. `stable` returns whether no rebalance is in progress."""

    def __init__(
        self,
        store: JobStore,
        persistence: Persistence,
        ledger: Ledger,
        in_flight: InFlight,
        runner: Runner,
        acceptor: Acceptor,
        lease_s: float,
        stable: Callable[[], bool],
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._ledger = ledger
        self._in_flight = in_flight
        self._runner = runner
        self._acceptor = acceptor
        self._every_s = lease_s / RENEWALS_PER_LEASE
        self._stable = stable
        self._check = asyncio.Event()

    def check_now(self) -> None:
        """Check immediately for jobs of revoked partitions."""
        self._check.set()

    async def run(self) -> None:
        """Release jobs of revoked partitions and renew the others, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await self._check.wait()
            except TimeoutError:
                pass
            self._check.clear()
            if self._stable():
                await self.release(self._in_flight.reassigned(self._ledger.partitions))
            await self._renew()

    async def release(self, jobs: Sequence[Job]) -> None:
        """Release jobs, so that the worker that now has their records can claim them immediately."""
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
                self.give_up(job)

    def give_up(self, job: Job) -> None:
        """Stop a job that another worker has claimed with a newer fence, and decide about its records again."""
        telemetry.STALE_WRITES.inc()
        self._runner.drop([job])
        self._in_flight.remove(job)
        self._acceptor.recheck(job)
