"""Jobs that must wait for long leave this worker's memory for the database, and come back when they are due."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from schemas.common import ErrorCode, Lane
from services.errors import PermanentError
from services.process import telemetry
from services.worker.in_flight import Held
from services.worker.jobs import NO_TRIAL, Candidate, Job, JobKey, Outcome, Phase, expired, failed
from services.worker.offsets.ledger import Ledger
from services.worker.queue.parking_store import ParkingStore, TakenUp, Ticket
from services.worker.store.persistence import Persistence, isolate

MAX_BATCH = 200
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Ways:
    """Where jobs go from here: those that may run, those that ended, those that were another worker's, and the number
    of a trial for one that must be alone in the engine."""

    run: Callable[[Sequence[Job]], Awaitable[None]]
    finish: Callable[[Outcome], None]
    stale: Callable[[Job], None]
    drop: Callable[[Collection[Job]], None]
    trial: Callable[[], int]


class Parking:
    """One loop: writes what is to be parked, and takes up what is due. `room` says how many of which lanes may come."""

    def __init__(
        self,
        store: ParkingStore,
        persistence: Persistence,
        ledger: Ledger,
        held: Held,
        ways: Ways,
        room: Callable[[], tuple[list[Lane], int]],
        poll_s: float,
        patience_s: float,
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._ledger = ledger
        self._held = held
        self._ways = ways
        self._room = room
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._tickets: deque[Ticket] = deque()
        self._deliveries: deque[Candidate] = deque()
        self._digests: set[str] = set()
        self._wake = asyncio.Event()

    def park(self, ticket: Ticket) -> None:
        """Take a job that nobody else here has any more; its records are done with once it is written."""
        ticket.job.phase = Phase.COMPLETING
        self._tickets.append(ticket)
        self._wake.set()

    def keep(self, candidate: Candidate) -> bool:
        """Keep the request of a job that another worker has; False, and nothing happens, before that took long.

        The record is done with once it is written.
        """
        if time.monotonic() - candidate.received_at < self._patience_s:
            return False
        self._deliveries.append(candidate)
        self._wake.set()
        return True

    def hurry(self, digest: str) -> None:
        """What became of this adapter is known: jobs that are parked for it are due."""
        self._digests.add(digest)
        self._wake.set()

    def wake(self) -> None:
        """Something may be due."""
        self._wake.set()

    async def run(self) -> None:
        """Park and take up, for ever."""
        while True:
            await self.write()
            await self._take_up()
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def write(self) -> None:
        """Park everything that waits for it."""
        while self._tickets:
            await self._park([self._tickets.popleft() for _ in range(min(len(self._tickets), MAX_BATCH))])
        while self._deliveries:
            await self._keep([self._deliveries.popleft() for _ in range(min(len(self._deliveries), MAX_BATCH))])
        while self._digests:
            await self._persistence.insist(partial(self._store.hurry, self._digests.pop()))

    async def _park(self, tickets: list[Ticket]) -> None:
        tickets = [
            ticket for ticket in tickets if self._held.get(ticket.job.key) is ticket.job
        ]  # or given up meanwhile
        outcomes = await isolate(tickets, self._written, self._refused) if tickets else []
        for ticket, is_ours in zip(tickets, outcomes, strict=True):
            if is_ours is None:
                continue
            self._held.remove(ticket.job)
            if not is_ours:
                self._ways.stale(ticket.job)
                continue
            telemetry.JOBS_PARKED.labels(reason=ticket.reason).inc()
            for place in ticket.job.places:
                self._ledger.finish(place)

    async def _written(self, tickets: Sequence[Ticket]) -> list[bool | None]:
        ours: set[JobKey] = await self._persistence.insist(partial(self._store.park, tickets))
        return [ticket.job.key in ours for ticket in tickets]

    async def _refused(self, ticket: Ticket, error: PermanentError) -> bool | None:
        """The database refuses this one: it ends."""
        self._ways.finish(failed(ticket.job, ErrorCode.ENGINE_ERROR, f"the job cannot be parked: {error}"))
        return None

    async def _keep(self, candidates: list[Candidate]) -> None:
        waiting = [each for each in candidates if self._ledger.holds(each.record.place)]
        if waiting:
            await self._persistence.insist(partial(self._store.store_deliveries, waiting))
        for candidate in waiting:
            telemetry.JOBS_PARKED.labels(reason="lease").inc()
            self._ledger.finish(candidate.record.place)

    async def _take_up(self) -> None:
        while True:
            lanes, limit = self._room()
            if not lanes or limit <= 0:
                return
            asked = min(limit, MAX_BATCH)
            taken = await self._persistence.insist(partial(self._store.take_due, lanes, asked))
            jobs = [job for each in taken if (job := self._take(each)) is not None]
            if jobs:
                await self._ways.run(jobs)
            if len(taken) < asked:
                return

    def _take(self, each: TakenUp) -> Job | None:
        """Hold the job; returns it if it may run."""
        telemetry.JOBS_UNPARKED.inc()
        candidate, grant, now = each.due.candidate, each.taken.grant, time.monotonic()
        trial = self._ways.trial() if each.due.alone else NO_TRIAL
        job = Job(candidate, grant, now, attempts=grant.attempts, trial=trial)
        if each.due.cold_for_s is not None:
            job.cold_since, job.load_s = now - each.due.cold_for_s, each.due.cold_for_s
        if (earlier := self._held.get(job.key)) is not None:
            self._replace(earlier, job)
        self._held.add(job)
        deadline = job.request.deadline
        if deadline is not None and deadline <= each.taken_at:
            self._ways.finish(expired(job))
        elif each.taken.doom is not None:
            self._ways.finish(failed(job, each.taken.doom.code, each.taken.doom.message))
        else:
            return job
        return None

    def _replace(self, earlier: Job, job: Job) -> None:
        """Our own lease had run out, and we took the job a second time: the newer fence is the one that counts."""
        telemetry.STALE_WRITES.inc()
        self._ways.drop([earlier])
        self._held.remove(earlier)
        job.places = earlier.places
