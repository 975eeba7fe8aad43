"""What an outcome writes to the database: result row, token usage, event and webhook. Pure."""

import json
import math
import time
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, NamedTuple
from uuid import UUID

from pydantic_core import to_json

from schemas.common import MAX_INLINE_OUTPUT_BYTES, JobState
from schemas.events import JobError
from services.postgres.identifiers import driver_uuid7
from services.postgres.pool import storable
from services.worker.engine.protocol import Finished
from services.worker.jobs import Job, JobKey, Outcome


class Timings(NamedTuple):
    """Milliseconds: in the backlog, loading the adapter, to the first token, from acceptance to the end."""

    queue_ms: float
    load_ms: float
    first_token_ms: float | None
    total_ms: float


class Effect(NamedTuple):
    """One row of the outbox."""

    event_id: UUID
    kind: str
    type: str
    body: str
    target: str


class Completion(NamedTuple):
    """An outcome with everything that is written for it. Built once, so that a repeated write is identical."""

    outcome: Outcome
    timings: Timings
    effects: tuple[Effect, ...]
    traceparent: str | None
    output_url: str | None

    @property
    def job(self) -> Job:
        """The job that ended."""
        return self.outcome.job


def completion(
    outcome: Outcome, pool: str, now: float, traceparent: str | None = None, output_url: str | None = None
) -> Completion:
    """Everything that is written for an outcome; `now` is monotonic seconds."""
    timings = timings_of(outcome, now)
    data = outcome_json(outcome, timings, output_url)
    event_type, event_id = f"job.{outcome.state}", driver_uuid7()
    finished_at = _utc(time.time_ns() // 1_000_000)
    event = event_json(event_id, pool, event_type, outcome.job.key, finished_at, traceparent, data)
    effects: tuple[Effect, ...] = (Effect(event_id, "event", event_type, event, ""),)
    if (url := outcome.job.claim.webhook_url) is not None:
        body = f'{{"type":"{event_type}","timestamp":"{finished_at}","data":{data}}}'
        effects = (*effects, Effect(event_id, "webhook", event_type, body, url))
    return Completion(outcome, timings, effects, traceparent, output_url)


@lru_cache(maxsize=1)
def _utc(milliseconds: int) -> str:
    """The time as the schemas format it, whole seconds without a fraction; cached, as most of a batch share it."""
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()[:-6]}Z"


def timings_of(outcome: Outcome, now: float) -> Timings:
    """The timings as the row and the webhook report them."""
    job, finished = outcome.job, outcome.finished
    first_token_s = finished.first_token_s if finished else None
    first_token_ms = None if first_token_s is None else _ms(first_token_s)
    return Timings(_ms(job.queue_s()), _ms(job.load_s), first_token_ms, _ms(job.total_s(now)))


def event_json(
    event_id: UUID, pool: str, event_type: str, key: JobKey, at: str, traceparent: str | None, data: str
) -> str:
    """A CloudEvent; ids, times and names of pools and tenants contain nothing that JSON escapes."""
    return (
        f'{{"specversion":"1.0","id":"{event_id}","source":"/loraq/{pool}","type":"{event_type}",'
        f'"subject":"{key.tenant}/{key.job_id}","time":"{at}","datacontenttype":"application/json",'
        f'"traceparent":{_text(traceparent)},"data":{data}}}'
    )


def outcome_json(outcome: Outcome, timings: Timings, output_url: str | None) -> str:
    """`data` of the event and of the webhook: a JobOutcome.

    Formatted by hand: a model would validate again what was validated on arrival, which takes as long as all the rest.
    A test parses the text with the model. A large output that could not be uploaded is only in its row: escaped, it
    may exceed the broker's record limit, and the event would never be delivered.
    """
    job, error = outcome.job, outcome.error
    adapter, version = job.request.adapter, job.claim.adapter.version if job.claim.adapter else None
    finished = outcome.finished if outcome.state is JobState.SUCCEEDED else None
    text = storable(finished.text) if finished and not is_large(outcome) else None
    return (
        f'{{"job_id":"{job.key.job_id}","tenant":"{job.key.tenant}",'
        f'"adapter":{_text(adapter.split("@")[0] if adapter else None)},"adapter_version":{_number(version)},'
        f'"state":"{outcome.state}","output_text":{_text(text)},"output_url":{_text(output_url)},'
        f'"finish_reason":{_text(finished.finish_reason if finished else None)},'
        f'"usage":{_usage_json(finished) if finished else "null"},"timings":{_timings_json(timings)},'
        f'"error":{_error_json(error) if error else "null"},"metadata":{metadata_json(job.request.metadata)}}}'
    )


def metadata_json(metadata: dict[str, Any]) -> str:
    """Metadata as received, for the row, the event and the webhook."""
    return to_json(metadata).decode() if metadata else "{}"


def _usage_json(finished: Finished) -> str:
    return (
        f'{{"prompt_tokens":{finished.prompt_tokens},"cached_tokens":{finished.cached_tokens},'
        f'"completion_tokens":{finished.completion_tokens}}}'
    )


def _timings_json(timings: Timings) -> str:
    return (
        f'{{"queue_ms":{timings.queue_ms!r},"load_ms":{timings.load_ms!r},'
        f'"first_token_ms":{_number(timings.first_token_ms)},"total_ms":{timings.total_ms!r}}}'
    )


def _error_json(error: JobError) -> str:
    return f'{{"code":"{error.code}","message":{_text(storable(error.message))}}}'


def _text(text: str | None) -> str:
    return "null" if text is None else encode_basestring(text)


def _number(number: float | None) -> str:
    return "null" if number is None else repr(number)


def is_large(outcome: Outcome) -> bool:
    """Whether the output is stored as an S3 object, with only its URL in rows and webhooks."""
    finished = outcome.finished
    return (
        outcome.state is JobState.SUCCEEDED
        and finished is not None
        and 4 * len(finished.text) > MAX_INLINE_OUTPUT_BYTES  # cheap bound: a short text is not encoded
        and len(finished.text.encode()) > MAX_INLINE_OUTPUT_BYTES
    )


def logprobs_json(logprobs: list[dict[int, float]] | None) -> str | None:
    """Per generated token a map from token id to log-probability; null where that is not finite."""
    if logprobs is None:
        return None
    rows = [{token: value if math.isfinite(value) else None for token, value in row.items()} for row in logprobs]
    return json.dumps(rows, separators=(",", ":"), allow_nan=False)


def _ms(seconds: float) -> float:
    return int(seconds * 1_000_000 + 0.5) / 1000  # `round` to three digits takes four times as long
