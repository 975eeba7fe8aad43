"""The public columns of the schema `loraq` in Postgres, which readers of the tables may rely on.

Each description equals the column's comment in the database; a test compares the two.
"""

from datetime import date
from typing import Literal
from uuid import UUID

from pydantic import AwareDatetime, ConfigDict, Field, JsonValue

from schemas.common import AdapterStatus, ErrorCode, FinishReason, JobState, Lane, OverLimit, Strict, WaitReason


class Row(Strict):
    """One row. Not strict, because Postgres returns enumerations as text."""

    model_config = ConfigDict(strict=False)


class JobRow(Row):
    """One row per accepted job, in every state of its life. Partitioned by accepted_on."""

    tenant: str = Field(description="Owner of the job.")
    job_id: UUID = Field(description="Unique per tenant; as sent, or derived from where the record stands.")
    pool: str = Field(description="The deployment of one base model that served the job.")
    adapter: str | None = Field(description="Adapter name as asked for, without version; null for the base model.")
    adapter_version: int | None = Field(
        description="The version fixed when the job was first taken; null for the base model."
    )
    lane: Lane = Field(description="interactive, standard or batch: the topic it came from.")
    state: JobState = Field(
        description="queued, running, parked, succeeded, failed, cancelled or expired; the last four are terminal."
    )
    error_code: ErrorCode | None = Field(
        description="Stable error code, null unless the job failed, was cancelled or expired."
    )
    error_message: str | None = Field(description="A sentence that names the culprit and what to do.")
    attempts: int = Field(
        description="Attempts charged to the job: handings to an engine, save those that ended with others in it."
    )
    accepted_on: date = Field(description="Day (UTC) of acceptance by the database clock; the partition key.")
    accepted_at: AwareDatetime = Field(description="When a worker first recorded the job.")
    started_at: AwareDatetime | None = Field(description="When the newest attempt began.")
    finished_at: AwareDatetime | None = Field(description="When the job reached its terminal state.")
    worker: str | None = Field(description="The worker of the newest attempt.")
    replay_of: UUID | None = Field(description="The job that this one replays, if any.")
    metadata: dict[str, JsonValue] = Field(description="The metadata that came with the request, unchanged.")
    wait_reason: WaitReason | None = Field(
        description="Why the job waits, as of the last renewal of its lease: adapter_loading, overtaken_for_affinity, "
        "tenant_over_share, tenant_limit or engine_full; null while it does not wait."
    )
    wait_since: AwareDatetime | None = Field(
        description="Since when the job waits for that reason; null while it does not wait."
    )


class ResultRow(Row):
    """One row per succeeded job, never changed. Partitioned by accepted_on."""

    tenant: str = Field(description="Owner of the job.")
    job_id: UUID = Field(description="The job that this result belongs to.")
    accepted_on: date = Field(description="Day (UTC) of acceptance; joins jobs partition by partition.")
    output_text: str | None = Field(
        description="The generated text; null when it was stored at output_url. U+0000 is written as U+2400."
    )
    output_url: str | None = Field(description="Where a large output lies; null otherwise.")
    output_token_ids: tuple[int, ...] = Field(description="The generated tokens, exact.")
    logprobs: list[dict[str, float]] | None = Field(
        description="Per generated token a map token id to log-probability; null unless asked for."
    )
    finish_reason: FinishReason = Field(description="stop or length.")
    prompt_tokens: int = Field(description="Tokens of the prompt.")
    cached_tokens: int = Field(description="Tokens of the prompt that the prefix cache served.")
    completion_tokens: int = Field(description="Tokens generated.")
    queue_ms: float = Field(
        description="Milliseconds from acceptance to the start of the attempt, adapter loading excluded."
    )
    load_ms: float = Field(description="Milliseconds spent waiting for the adapter.")
    first_token_ms: float | None = Field(description="Milliseconds from the start of the attempt to the first token.")
    total_ms: float = Field(description="Milliseconds from acceptance to completion.")


class AdapterRow(Row):
    """Every version of every adapter, with the outcome of its admission."""

    tenant: str = Field(description="Owner of the adapter.")
    name: str = Field(description="Name, unique per tenant.")
    version: int = Field(description="Counts up from 1 with every push of new content under the name.")
    status: AdapterStatus = Field(description="pending, ready, rejected or disabled.")
    status_reason: str | None = Field(description="Why it is rejected or disabled, or a remark on a ready one.")
    base_model: str | None = Field(description="Base model that the adapter names in its own configuration.")
    base_fingerprint: str | None = Field(description="Fingerprint of the base model that it was admitted for.")
    rank: int | None = Field(description="Largest true rank of its tensors.")
    target_modules: tuple[str, ...] = Field(description="Projections that it adapts.")
    uri: str = Field(description="s3:// prefix of its two files.")
    digest: str = Field(description="SHA-256 over both files, each framed by name and length: its identity everywhere.")
    size_bytes: int = Field(description="Bytes of both files.")
    score: float | None = Field(description="Score of the newest evaluation, if any.")
    pinned: bool = Field(description="Kept in host memory whatever the traffic.")
    created_at: AwareDatetime = Field(description="When it was pushed.")


class WebhookDeliveryRow(Row):
    """Every attempt to deliver a webhook."""

    id: int = Field(description="Counts the attempts of all webhooks.")
    webhook_id: UUID = Field(description="The webhook-id header: the same for every attempt of one event.")
    tenant: str = Field(description="Owner of the job.")
    job_id: UUID = Field(description="The job whose outcome is delivered.")
    url: str = Field(description="Where it was sent.")
    attempt: int = Field(description="Counts from 1 for each webhook.")
    outcome: Literal["delivered", "retrying", "failed", "blocked"] = Field(
        description="delivered (2xx), retrying, failed (given up) or blocked (the address is not allowed)."
    )
    status_code: int | None = Field(description="HTTP status, null without an answer.")
    error: str | None = Field(description="Why it was not delivered.")
    started_at: AwareDatetime = Field(description="When the attempt began.")
    duration_ms: float = Field(description="How long it took, in milliseconds.")
    next_attempt_at: AwareDatetime | None = Field(description="When the next attempt is due; null when there is none.")


class UsageRow(Row):
    """Tokens of committed results per tenant, adapter and hour of their finish."""

    tenant: str = Field(description="Owner of the jobs.")
    adapter: str = Field(description="Adapter name; empty for the base model.")
    adapter_version: int = Field(description="Adapter version; 0 for the base model.")
    hour: AwareDatetime = Field(description="Start of the hour, UTC.")
    jobs: int = Field(description="Succeeded jobs.")
    prompt_tokens: int = Field(description="Prompt tokens.")
    cached_tokens: int = Field(description="Prompt tokens that the prefix cache served.")
    completion_tokens: int = Field(description="Generated tokens.")
    wasted_tokens: int = Field(description="Tokens of attempts that were abandoned.")


class TenantLimitRow(Row):
    """Limits by tenant, in each pool; a tenant without a row has none. Written by `loraq tenants limits`."""

    tenant: str = Field(description="The tenant.")
    weight: float = Field(description="Its share of a lane relative to other tenants, whose weight is 1 by default.")
    running: int | None = Field(description="Most jobs that run at once in a pool; 0 runs none, null means no limit.")
    queued: int | None = Field(
        description="Most jobs that wait in the memory of a pool's workers; null means no limit."
    )
    tokens_per_s: float | None = Field(
        description="Prompt and output tokens per second in a pool, in the long run; null means no limit."
    )
    burst: float | None = Field(
        description="Tokens that may be used at once after a pause; null means 10 seconds of tokens_per_s."
    )
    over_limit: OverLimit = Field(
        description="What happens to a job that cannot run soon: wait parks it, refuse fails it with limit_exceeded."
    )
    changed_at: AwareDatetime = Field(description="When the limits were last changed.")
