"""Outgoing messages: webhook bodies and CloudEvents on `<prefix>.<pool>.events`."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import AwareDatetime, Field, JsonValue

from schemas.common import ErrorCode, FinishReason, JobState, Strict

TerminalEventType = Literal["job.succeeded", "job.failed", "job.cancelled", "job.expired"]


class Usage(Strict):
    """Tokens of the committed attempt; `cached_tokens` is the part of the prompt that the prefix cache served."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Timings(Strict):
    """Milliseconds: waiting in the backlog, loading the adapter, to the first token, and from acceptance to the end."""

    queue_ms: float
    load_ms: float
    first_token_ms: float | None
    total_ms: float


class JobError(Strict):
    """Why a job did not succeed."""

    code: ErrorCode
    message: str


class JobOutcome(Strict):
    """`data` of a webhook and of an event: one job in its terminal state."""

    job_id: UUID
    tenant: str
    adapter: str | None
    adapter_version: int | None
    state: JobState
    output_text: str | None = None
    output_url: str | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings
    error: JobError | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class WebhookBody(Strict):
    """Body of a webhook, following the Standard Webhooks specification."""

    type: TerminalEventType
    timestamp: AwareDatetime
    data: JobOutcome


class CloudEvent(Strict):
    """CloudEvents 1.0 in structured JSON mode; `id` equals the webhook-id of the same outcome."""

    specversion: Literal["1.0"] = "1.0"
    id: str
    source: Annotated[str, Field(description="/loraq/<pool>")]
    type: TerminalEventType
    subject: Annotated[str, Field(description="<tenant>/<job_id>")]
    time: AwareDatetime
    datacontenttype: Literal["application/json"] = "application/json"
    traceparent: str | None = None
    data: JobOutcome
