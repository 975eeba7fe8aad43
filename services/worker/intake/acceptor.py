"""Turns records into jobs: validates them, recognises duplicates, and claims the rest, a batch per transaction."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from schemas.common import ErrorCode, Lane
from services.errors import PermanentError
from services.process import telemetry
from services.worker.in_flight import InFlight
from services.worker.intake.dead_letters import DeadLetters
from services.worker.intake.records import authenticate, parse
from services.worker.intake.tenant_keys import TenantKeys
from services.worker.jobs import Candidate, Job, Outcome, Record, Rejection, cancelled, failed
from services.worker.offsets.ledger import Ledger
from services.worker.store.decisions import Claimed, Conflict, Decision, Ended, Leased, MayStart
from services.worker.store.jobs import JobStore
from services.worker.store.persistence import Persistence, isolate

MAX_BATCH = 500
MAX_RECHECK_S = 1.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Refused:
    """The database cannot store this job, even on its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class AcceptorCallbacks:
    """`run` accepts jobs that can run, `finish` outcomes of jobs that cannot.

    `start_predicate` returns a predicate that says, once per job, whether the job would start immediately.
    `park_delivery` accepts a delivery whose job another worker has had for long; returns False if it should wait here.
    """

    run: Callable[[Sequence[Job]], None]
    finish: Callable[[Outcome], None]
    start_predicate: Callable[[], MayStart]
    park_delivery: Callable[[Candidate], bool]


class Acceptor:
    """A single loop, so that two deliveries of a job are never decided concurrently."""

    def __init__(
        self,
        store: JobStore,
        persistence: Persistence,
        keys: TenantKeys,
        ledger: Ledger,
        in_flight: InFlight,
        dead_letters: DeadLetters,
        callbacks: AcceptorCallbacks,
        *,
        cluster_id: str,
        require_signature: bool,
    ) -> None:
        self._store = store
        self._persistence = persistence
        self._keys = keys
        self._ledger = ledger
        self._in_flight = in_flight
        self._dead_letters = dead_letters
        self._callbacks = callbacks
        self._cluster_id = cluster_id
        self._require_signature = require_signature
        self._arrived: deque[Candidate] = deque()
        self._undecided: Counter[Lane] = Counter()
        self._rechecks: deque[Candidate] = deque()
        self._leased: list[tuple[float, Candidate]] = []
        self._wake = asyncio.Event()

    def receive(self, records: Iterable[Record]) -> None:
        """Validate new records and queue them; bounded by the ledger's unfinished records.

        Runs here and not in the loop, so that it overlaps with the loop's waits for the database.
        """
        now, now_ns = time.monotonic(), time.time_ns()
        for record in records:
            parsed = parse(record, self._cluster_id, now, now_ns)
            if isinstance(parsed, Candidate):
                self._arrived.append(parsed)
                self._undecided[record.lane] += 1
            else:
                self._dead_letters.put(parsed)
        self._wake.set()

    def num_undecided(self, lane: Lane) -> int:
        """Candidates of a lane that may still become jobs in flight."""
        return self._undecided[lane]

    def recheck(self, job: Job) -> None:
        """Decide again about every record of a job that another worker owns now."""
        for place in job.places:
            record = job.candidate.record._replace(place=place)
            self._rechecks.append(job.candidate._replace(record=record))
        self._wake.set()

    async def run(self) -> None:
        """Decide about candidates until cancelled."""
        while True:
            await self._wait()
            while self._arrived or self._rechecks:
                arrived = self._next_arrived()  # a rebalance may have revoked some
                present = [each for each in arrived if self._ledger.is_open(each.record.place)]
                candidates = await self._authenticated(present) + self._next_rechecks()
                await self._accept(self._not_in_flight(candidates))
                self._undecided.subtract(each.record.lane for each in arrived)

    async def _wait(self) -> None:
        """Wait until a candidate arrives or another worker's lease may have expired."""
        due = min((at for at, _ in self._leased), default=None)
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        now = time.monotonic()
        self._rechecks.extend(candidate for at, candidate in self._leased if at <= now)
        self._leased = [(at, candidate) for at, candidate in self._leased if at > now]

    def _next_arrived(self) -> list[Candidate]:
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), MAX_BATCH))]

    def _next_rechecks(self) -> list[Candidate]:
        rechecks, self._rechecks = list(self._rechecks), deque()
        return rechecks

    async def _authenticated(self, candidates: list[Candidate]) -> list[Candidate]:
        """The authenticated candidates; the others are dead-lettered."""
        names = {candidate.key.tenant for candidate in candidates}
        tenants = await self._persistence.retry_until_done(partial(self._keys.of, names)) if names else {}
        authenticated = []
        for candidate in candidates:
            rejection = authenticate(candidate, tenants, require_signature=self._require_signature)
            if rejection is None:
                authenticated.append(candidate)
            else:
                self._dead_letters.put(rejection)
        return authenticated

    def _not_in_flight(self, candidates: list[Candidate]) -> list[Candidate]:
        """One candidate per job that is not in flight; a second delivery in this batch waits for the next batch."""
        first: dict[tuple[object, ...], Candidate] = {}
        for candidate in candidates:
            if not self._ledger.is_open(candidate.record.place):
                continue
            job = self._in_flight.get(candidate.key)
            if job is not None:
                self._join(job, candidate)
            elif candidate.key in first:
                self._rechecks.append(candidate)
            else:
                first[candidate.key] = candidate
        return list(first.values())

    def _join(self, job: Job, candidate: Candidate) -> None:
        if job.candidate.fingerprint != candidate.fingerprint:
            self._conflict(candidate)
            return
        telemetry.JOBS_DUPLICATE.labels(lane=candidate.record.lane).inc()
        self._in_flight.join(job, candidate.record.place)

    async def _accept(self, candidates: list[Candidate]) -> None:
        if not candidates:
            return
        decisions = await isolate(candidates, self._ask, _refused)
        runnable: list[Job] = []
        for candidate, decision in zip(candidates, decisions, strict=True):
            job = self._apply(candidate, decision)
            if job is not None:
                runnable.append(job)
        if runnable:
            self._callbacks.run(runnable)

    async def _ask(self, candidates: Sequence[Candidate]) -> list[Decision | Refused]:
        return list(await self._persistence.retry_until_done(partial(self._decide, candidates)))

    async def _decide(self, candidates: Sequence[Candidate]) -> list[Decision]:
        return await self._store.accept(candidates, self._callbacks.start_predicate())

    def _apply(self, candidate: Candidate, decision: Decision | Refused) -> Job | None:
        """Apply a decision; returns the job if it can run."""
        match decision:
            case Claimed():
                return self._admit(candidate, decision)
            case Ended():
                telemetry.JOBS_DUPLICATE.labels(lane=candidate.record.lane).inc()
                self._ledger.finish(candidate.record.place)
            case Leased(left_s) if not self._callbacks.park_delivery(candidate):
                self._leased.append((time.monotonic() + min(left_s + 0.01, MAX_RECHECK_S), candidate))
            case Conflict():
                self._conflict(candidate)
            case Leased():
                pass
            case Refused(reason):
                self._dead_letters.put(Rejection(candidate.record, ErrorCode.INVALID_MESSAGE, reason))
        return None

    def _admit(self, candidate: Candidate, claimed: Claimed) -> Job | None:
        job = Job(candidate, claimed.claim, time.monotonic(), [candidate.record.place], attempts=claimed.claim.attempts)
        job.counted = claimed.counted
        self._in_flight.add(job)
        if claimed.cancelled:
            self._callbacks.finish(cancelled(job))
        elif claimed.failure is not None:
            self._callbacks.finish(failed(job, claimed.failure.code, claimed.failure.message))
        else:
            return job
        return None

    def _conflict(self, candidate: Candidate) -> None:
        message = (
            f"tenant {candidate.key.tenant!r} used job_id {candidate.key.job_id} before for a different request;"
            " send this one under a new id"
        )
        self._dead_letters.put(Rejection(candidate.record, ErrorCode.ID_CONFLICT, message))


async def _refused(_candidate: Candidate, error: PermanentError) -> Decision | Refused:
    return Refused(f"the job cannot be stored: {error}")
