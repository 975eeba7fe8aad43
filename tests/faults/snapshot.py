"""The state that a run left behind, as plain values: the input of the checker. All times are Unix time on one clock."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from uuid import UUID

from services.worker.offsets.ledger import Place


class Key(NamedTuple):
    """Identity of a job."""

    tenant: str
    job_id: UUID


@dataclass(frozen=True)
class Sent:
    """A record that was sent. `place` is None if no broker acknowledged it: it may or may not be in the topic.

    `fate` is the required outcome: a job row or a dead letter. The fault itself deleted `exempt` records.
    """

    key: Key
    place: Place | None
    fate: Literal["job", "dead letter"] = "job"
    webhook: bool = True
    deadline: float | None = None
    exempt: bool = False


@dataclass(frozen=True)
class Job:
    """A row of `jobs`; `committed_at` is the commit time of the transaction that wrote it last."""

    key: Key
    state: str
    attempts: int
    fence: int
    worker: str | None
    error_code: str | None
    committed_at: float
    adapter: str = ""
    adapter_version: int = 0


@dataclass(frozen=True)
class Result:
    """A row of `results`."""

    key: Key
    output: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_ms: float
    committed_at: float


@dataclass(frozen=True)
class Effect:
    """A row of `outbox`."""

    event_id: UUID
    kind: str
    key: Key
    state: str


@dataclass(frozen=True)
class Delivery:
    """A row of `webhook_deliveries`."""

    webhook_id: UUID
    key: Key
    attempt: int
    outcome: str
    began_at: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Rows of `usage_hourly`, summed over the hours."""

    tenant: str
    adapter: str
    adapter_version: int
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wasted_tokens: int


@dataclass(frozen=True)
class Event:
    """A record of the events topic; `at` is the broker's clock when it was appended, in whole milliseconds."""

    event_id: UUID
    key: Key
    state: str
    output: str | None
    at: float


@dataclass(frozen=True)
class Webhook:
    """A webhook that the recorder received; `signed`: the signature is valid; `status`: the reply."""

    webhook_id: UUID
    key: Key
    state: str
    output: str | None
    at: float
    timestamp: int
    signed: bool
    status: int


@dataclass(frozen=True)
class DeadLetter:
    """A record of the dead-letter topic; `source` is the position of the original record."""

    source: Place
    code: str


@dataclass(frozen=True)
class Call:
    """A request that reached an engine."""

    key: Key
    at: float


class EarlyCommit(NamedTuple):
    """An offset committed too early, observed during the run: a record below it was neither terminal, nor parked, nor
    dead-lettered when the tables were read afterwards."""

    committed: Place
    unsettled: Place


@dataclass(frozen=True)
class Snapshot:
    """All state of one run."""

    sent: tuple[Sent, ...] = ()
    jobs: tuple[Job, ...] = ()
    results: tuple[Result, ...] = ()
    outbox: tuple[Effect, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    usage: tuple[Usage, ...] = ()
    events: tuple[Event, ...] = ()
    webhooks: tuple[Webhook, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    calls: tuple[Call, ...] = ()
    early_commits: tuple[EarlyCommit, ...] = ()
    uncommitted: tuple[Place, ...] = field(default=())
    """Acknowledged records at or above their group's committed offset after the run."""
