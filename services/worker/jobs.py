"""What the worker passes from hand to hand: a record, the job made of it, and how it ended."""

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
"""The group of jobs on the base model; the others' is their adapter's digest."""
NO_TRIAL = 0

Headers = tuple[tuple[str, bytes | None], ...]


class JobKey(NamedTuple):
    """Identity of a job: ids are unique per tenant."""

    tenant: str
    job_id: UUID


class Record(NamedTuple):
    """A Kafka record as it came. `timestamp_ms` is the broker's, milliseconds since 1970."""

    place: Place
    lane: Lane
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    def header(self, name: str) -> bytes | None:
        """The last header of that name: duplicates are legal, and the last writer stood nearest to the broker."""
        if not self.headers:
            return None
        return next((value for key, value in reversed(self.headers) if key == name), None)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that no job can be made of."""

    record: Record
    code: ErrorCode
    message: str


class Candidate(NamedTuple):
    """A valid record that the database has not been asked about yet.

    `received_at` is monotonic seconds; `received_ns` the same moment in nanoseconds since 1970, for spans.
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
class Grant:
    """What taking a job fixed: its fence, the adapter version and the address of its webhook.

    `age_s` is the time since acceptance on the database's clock; 0 unless this is a redelivery.
    """

    fence: int
    accepted_on: date
    age_s: float
    attempts: int
    adapter: AdapterVersion | None
    webhook_url: str | None


class Phase(Enum):
    """Where a held job is inside this worker."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETING = "completing"


@dataclass(slots=True, eq=False)
class Job:
    """A job that this worker holds. Times are monotonic seconds.

    `counted`: the database counts its next attempt already, which `attempts` does not. `places` is empty for one that
    was parked: its records are done with. `cold_since` is since when it waits for its adapter, being parked included;
    None unless it was parked for that. With a `trial` it runs only beside the jobs of that trial. `key`, `request` and
    `lane` are the candidate's.
    """

    candidate: Candidate
    grant: Grant
    taken_at: float
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
        """Its adapter's digest, or the group of the base model."""
        return self.grant.adapter.digest if self.grant.adapter else BASE_GROUP

    def total_s(self, now: float) -> float:
        """Seconds since acceptance."""
        return self.grant.age_s + (now - self.taken_at)

    def queue_s(self) -> float:
        """Seconds from acceptance to the newest attempt's start, waiting for the adapter excluded."""
        if self.started_at is None:
            return 0.0
        return max(0.0, self.total_s(self.started_at) - self.load_s)


class Outcome(NamedTuple):
    """How a job ended. `finished` is what the engine said; its tokens count as wasted unless the job succeeded."""

    job: Job
    state: JobState
    error: JobError | None = None
    finished: Finished | None = None


def failed(job: Job, code: ErrorCode, message: str, finished: Finished | None = None) -> Outcome:
    """The job ends as failed."""
    return Outcome(job, JobState.FAILED, JobError(code=code, message=message), finished)


def cancelled(job: Job) -> Outcome:
    """Somebody asked for the job to be cancelled before it ended."""
    return Outcome(
        job, JobState.CANCELLED, JobError(code=ErrorCode.CANCELLED, message="the job was cancelled on request")
    )


def expired(job: Job) -> Outcome:
    """The job's deadline passed before it was started."""
    assert job.request.deadline is not None
    message = f"the deadline {job.request.deadline.isoformat()} passed before the job was started"
    return Outcome(job, JobState.EXPIRED, JobError(code=ErrorCode.DEADLINE_EXCEEDED, message=message))
