"""The worker's shared types: a record, the job built from it, and its outcome."""

from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from schemas.common import ErrorCode, JobState, Lane
from schemas.events import JobError
from schemas.job import JobRequest
from services.adapters.versions import AdapterVersion
from services.worker.engine.protocol import Finished
from services.worker.offsets.ledger import Place

BASE_GROUP = ""
"""Group of the jobs on the base model; every other group is an adapter's digest."""
NO_TRIAL = 0

Headers = tuple[tuple[str, bytes | None], ...]


class JobKey(NamedTuple):
    """Identity of a job: ids are unique per tenant."""

    tenant: str
    job_id: UUID


class Record(NamedTuple):
    """A Kafka record as received. `timestamp_ms` is the broker's, in milliseconds since 1970."""

    place: Place
    lane: Lane
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    def header(self, name: str) -> bytes | None:
        """The last header of that name: duplicates are legal, and the last one was added closest to the broker."""
        if not self.headers:
            return None
        return next((value for key, value in reversed(self.headers) if key == name), None)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that cannot become a job."""

    record: Record
    code: ErrorCode
    message: str


class Candidate(NamedTuple):
    """A valid record that has not been looked up in the database yet.

    `received_at` is in monotonic seconds; `received_ns` is the same moment in nanoseconds since 1970, for spans.
    """

    key: JobKey
    request: JobRequest
    fingerprint: bytes
    record: Record
    traceparent: str | None
    received_at: float
    received_ns: int
    replay_of: UUID | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What claiming a job fixed: its fence, adapter version and webhook URL.

    `age_s` is the time since acceptance by the database's clock; 0 unless the job had a row before.
    """

    fence: int
    accepted_on: date
    age_s: float
    attempts: int
    adapter: AdapterVersion | None
    webhook_url: str | None


class Phase(Enum):
    """Stage of a job in flight in this worker."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETING = "completing"


@dataclass(slots=True, eq=False)
class Job:
    """A job in flight in this worker. Times are monotonic seconds.

    `counted`: the database has counted the next attempt, `attempts` has not. `places` is empty for a job that was
    parked: its records are finished. `cold_since` is when the job began to wait for its adapter, parked time included;
    None unless it was parked for its adapter. A job with a `trial` runs only together with the jobs of that trial.
    `key`, `request` and `lane` are copied from the candidate.
    """

    candidate: Candidate
    claim: Claim
    claimed_at: float
    places: list[Place] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    attempts: int = 0
    started_at: float | None = None
    load_s: float = 0.0
    trial: int = NO_TRIAL
    counted: bool = False
    cold_since: float | None = None

    key: JobKey = field(init=False)
    request: JobRequest = field(init=False)
    lane: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.key, self.request, self.lane = self.candidate.key, self.candidate.request, self.candidate.record.lane

    @property
    def group(self) -> str:
        """The digest of its adapter, or `BASE_GROUP`."""
        return self.claim.adapter.digest if self.claim.adapter else BASE_GROUP

    def total_s(self, now: float) -> float:
        """Seconds since acceptance."""
        return self.claim.age_s + (now - self.claimed_at)

    def queue_s(self) -> float:
        """Seconds from acceptance to the start of the latest attempt, excluding the wait for the adapter."""
        if self.started_at is None:
            return 0.0
        return max(0.0, self.total_s(self.started_at) - self.load_s)


class Outcome(NamedTuple):
    """How a job ended. `finished` is the engine's output; its tokens count as wasted unless the job succeeded."""

    job: Job
    state: JobState
    error: JobError | None = None
    finished: Finished | None = None


def failed(job: Job, code: ErrorCode, message: str, finished: Finished | None = None) -> Outcome:
    """The outcome of a failed job."""
    return Outcome(job, JobState.FAILED, JobError(code=code, message=message), finished)


def cancelled(job: Job) -> Outcome:
    """The outcome of a job that was cancelled before it ended."""
    return Outcome(
        job, JobState.CANCELLED, JobError(code=ErrorCode.CANCELLED, message="the job was cancelled on request")
    )


def expired(job: Job) -> Outcome:
    """The outcome of a job whose deadline passed before it started."""
    assert job.request.deadline is not None
    message = f"the deadline {job.request.deadline.isoformat()} passed before the job was started"
    return Outcome(job, JobState.EXPIRED, JobError(code=ErrorCode.DEADLINE_EXCEEDED, message=message))
