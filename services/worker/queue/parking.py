"""Moves jobs with a long wait from this worker's memory to the database, and claims them when they are due."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from schemas.common import ErrorCode, Lane
from services.errors import PermanentError
from services.process import telemetry
from services.worker.in_flight import InFlight
from services.worker.jobs import NO_TRIAL, Candidate, Job, JobKey, Outcome, Phase, expired, failed
from services.worker.offsets.ledger import Ledger
from services.worker.queue.parking_store import ParkingStore, ParkRequest, Unparked
from services.worker.queue.preference import Standpoint
from services.worker.store.persistence import Persistence, isolate

MAX_BATCH = 200
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class ParkingCallbacks:
    """`run` accepts claimed jobs, `finish` outcomes, `stale` jobs that another worker owns; `drop` removes jobs from
    the backlog and the engine; `new_trial` returns the number of a new trial, for a job that must run alone.

    `over_limit` receives the tenants and lanes with jobs parked for a limit, and returns how many of each may be
    claimed now, the one to claim first first."""

    run: Callable[[Sequence[Job]], Awaitable[None]]
    finish: Callable[[Outcome], None]
    stale: Callable[[Job], None]
    drop: Callable[[Collection[Job]], None]
    new_trial: Callable[[], int]
    over_limit: Callable[[Sequence[tuple[str, Lane]]], list[tuple[str, Lane, int]]]


class Parking:
    """One loop that parks jobs and claims due ones.

    `claimable` returns the lanes and the most jobs to claim, `standpoint` what this worker knows of itself and others.
    """

    def __init__(
        self,
        store: ParkingStore,
        persistence: Persistence,
        ledger: Ledger,
        in_flight: InFlight,
        callbacks: ParkingCallbacks,
        claimable: Callable[[], tuple[list[Lane], int]],
        standpoint: Callable[[], Standpoint],
        poll_s: float,
        park_after_s: float,
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._ledger = ledger
        self._in_flight = in_flight
        self._callbacks = callbacks
        self._claimable = claimable
        self._standpoint = standpoint
        self._poll_s = poll_s
        self._park_after_s = park_after_s
        self._requests: deque[ParkRequest] = deque()
        self._deliveries: deque[Candidate] = deque()
        self._digests: set[str] = set()
        self._wake = asyncio.Event()

    def park(self, request: ParkRequest) -> None:
        """Park a job that is neither in the backlog nor in the engine; its records are finished once it is written."""
        request.job.phase = Phase.COMPLETING
        self._requests.append(request)
        self._wake.set()

    def park_delivery(self, candidate: Candidate) -> bool:
        """Park the delivery of a job that another worker owns; returns False if it has not waited long enough.

        Its record is finished once it is written.
        """
        if time.monotonic() - candidate.received_at < self._park_after_s:
            return False
        self._deliveries.append(candidate)
        self._wake.set()
        return True

    def make_due(self, digest: str) -> None:
        """Make the jobs that are parked for this adapter due: its load has ended."""
        self._digests.add(digest)
        self._wake.set()

    def wake(self) -> None:
        """Check for due jobs immediately."""
        self._wake.set()

    async def run(self) -> None:
        """Park jobs and claim due ones until cancelled."""
        while True:
            await self.write()
            await self._claim_due()
            await self._claim_over_limit()
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def write(self) -> None:
        """Write everything that is to be parked."""
        while self._requests:
            await self._park([self._requests.popleft() for _ in range(min(len(self._requests), MAX_BATCH))])
        while self._deliveries:
            await self._park_deliveries(
                [self._deliveries.popleft() for _ in range(min(len(self._deliveries), MAX_BATCH))]
            )
        while self._digests:
            await self._persistence.retry_until_done(partial(self._store.make_due, self._digests.pop()))

    async def _park(self, requests: list[ParkRequest]) -> None:
        # A job may have been given up meanwhile.
        requests = [request for request in requests if self._in_flight.get(request.job.key) is request.job]
        outcomes = await isolate(requests, self._written, self._refused) if requests else []
        for request, is_ours in zip(requests, outcomes, strict=True):
            if is_ours is None:
                continue
            self._in_flight.remove(request.job)
            if not is_ours:
                self._callbacks.stale(request.job)
                continue
            telemetry.JOBS_PARKED.labels(reason=request.reason).inc()
            for place in request.job.places:
                self._ledger.finish(place)

    async def _written(self, requests: Sequence[ParkRequest]) -> list[bool | None]:
        ours: set[JobKey] = await self._persistence.retry_until_done(partial(self._store.park, requests))
        return [request.job.key in ours for request in requests]

    async def _refused(self, request: ParkRequest, error: PermanentError) -> bool | None:
        """Fail a job that the database cannot store."""
        self._callbacks.finish(failed(request.job, ErrorCode.ENGINE_ERROR, f"the job cannot be parked: {error}"))
        return None

    async def _park_deliveries(self, candidates: list[Candidate]) -> None:
        waiting = [each for each in candidates if self._ledger.is_open(each.record.place)]
        if waiting:
            await self._persistence.retry_until_done(partial(self._store.store_deliveries, waiting))
        for candidate in waiting:
            telemetry.JOBS_PARKED.labels(reason="lease").inc()
            self._ledger.finish(candidate.record.place)

    async def _claim_due(self) -> None:
        while True:
            lanes, limit = self._claimable()
            if not lanes or limit <= 0:
                return
            asked = min(limit, MAX_BATCH)
            claim = partial(self._store.claim_due, lanes, asked, self._standpoint())
            claimed = await self._persistence.retry_until_done(claim)
            await self._run(claimed)
            if len(claimed) < asked:
                return

    async def _claim_over_limit(self) -> None:
        """Claim jobs whose tenant's limit has room again."""
        lanes, limit = self._claimable()
        if not lanes or limit <= 0:
            return
        parked = await self._persistence.retry_until_done(partial(self._store.over_limit, lanes))
        left = min(limit, MAX_BATCH)
        places: list[tuple[str, Lane, int]] = []
        for tenant, lane, count in self._callbacks.over_limit(parked):
            if (granted := min(count, left)) > 0:
                places.append((tenant, lane, granted))
                left -= granted
        if places:
            await self._run(await self._persistence.retry_until_done(partial(self._store.claim_over_limit, places)))

    async def _run(self, claimed: Sequence[Unparked]) -> None:
        jobs = [job for each in claimed if (job := self._admit(each)) is not None]
        if jobs:
            await self._callbacks.run(jobs)

    def _admit(self, each: Unparked) -> Job | None:
        """Put the job in flight; returns it if it may run."""
        telemetry.JOBS_UNPARKED.inc()
        candidate, claim, now = each.due.candidate, each.claimed.claim, time.monotonic()
        trial = self._callbacks.new_trial() if each.due.alone else NO_TRIAL
        job = Job(candidate, claim, now, attempts=claim.attempts, trial=trial)
        if each.due.cold_for_s is not None:
            job.cold_since, job.load_s = now - each.due.cold_for_s, each.due.cold_for_s
        if (earlier := self._in_flight.get(job.key)) is not None:
            self._replace(earlier, job)
        self._in_flight.add(job)
        deadline = job.request.deadline
        if deadline is not None and deadline <= each.claimed_at:
            self._callbacks.finish(expired(job))
        elif each.claimed.failure is not None:
            self._callbacks.finish(failed(job, each.claimed.failure.code, each.claimed.failure.message))
        else:
            return job
        return None

    def _replace(self, earlier: Job, job: Job) -> None:
        """Replace a job whose lease expired and that this worker claimed again: only the newer fence can write."""
        telemetry.STALE_WRITES.inc()
        self._callbacks.drop([earlier])
        self._in_flight.remove(earlier)
        job.places = earlier.places
