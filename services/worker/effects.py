"""What an outcome becomes in the database: its result row, its tokens, its event and its webhook. Pure."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from schemas.common import MAX_INLINE_OUTPUT_BYTES, JobState
from services.database import storable
from services.identifiers import uuid7
from services.worker.jobs import Job, Outcome
from services.worker.protocol import Finished

_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Spent(NamedTuple):
    """Milliseconds: waiting in the backlog, loading the adapter, to the first token, from acceptance to the end."""

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
    """An outcome with everything that is written for it; made once, written again as often as the database needs."""

    outcome: Outcome
    timings: Spent
    effects: tuple[Effect, ...]
    traceparent: str | None
    output_url: str | None

    @property
    def job(self) -> Job:
        """The job that ended."""
        return self.outcome.job


@dataclass(slots=True)
class Used:
    """Tokens of one adapter version; those of abandoned attempts are wasted."""

    jobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0


def completion(
    outcome: Outcome, pool: str, now: float, traceparent: str | None = None, output_url: str | None = None
) -> Completion:
    """Everything that is written for an outcome; `now` is monotonic seconds.

    The bodies are CloudEvent and WebhookBody, written as JSON by hand: their parts were checked when they came in, and
    checking them again on the way out costs as much as all the rest. A test reads them back through the models.
    """
    timings = timings_of(outcome, now)
    data = outcome_data(outcome, timings, output_url)
    finished_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    event_type = f"job.{outcome.state}"
    event_id = uuid7()
    event = {
        "specversion": "1.0",
        "id": str(event_id),
        "source": f"/loraq/{pool}",
        "type": event_type,
        "subject": f"{data['tenant']}/{data['job_id']}",
        "time": finished_at,
        "datacontenttype": "application/json",
        "traceparent": traceparent,
        "data": data,
    }
    effects = [Effect(event_id, "event", event_type, _to_json(event), "")]
    if (url := outcome.job.grant.webhook_url) is not None:
        body = {"type": event_type, "timestamp": finished_at, "data": data}
        effects.append(Effect(event_id, "webhook", event_type, _to_json(body), url))
    return Completion(outcome, timings, tuple(effects), traceparent, output_url)


def timings_of(outcome: Outcome, now: float) -> Spent:
    """Milliseconds as the row and the webhook tell them."""
    job, finished = outcome.job, outcome.finished
    first_token_s = finished.first_token_s if finished else None
    return Spent(
        queue_ms=_ms(job.queue_s()),
        load_ms=_ms(job.load_s),
        first_token_ms=None if first_token_s is None else _ms(first_token_s),
        total_ms=_ms(job.total_s(now)),
    )


def outcome_data(outcome: Outcome, timings: Spent, output_url: str | None) -> dict[str, object]:
    """`data` of the event and of the webhook: a JobOutcome's fields as JSON has them.

    A large output that could not be put into the object store is in its row alone: escaped, it may be larger than
    Kafka takes, and the event would never arrive.
    """
    job, error = outcome.job, outcome.error
    adapter = job.request.adapter
    finished = outcome.finished if outcome.state is JobState.SUCCEEDED else None
    return {
        "job_id": str(job.key.job_id),
        "tenant": job.key.tenant,
        "adapter": adapter.split("@")[0] if adapter else None,
        "adapter_version": job.grant.adapter.version if job.grant.adapter else None,
        "state": outcome.state,
        "output_text": storable(finished.text) if finished and not is_large(outcome) else None,
        "output_url": output_url,
        "finish_reason": finished.finish_reason if finished else None,
        "usage": _usage_of(finished) if finished else None,
        "timings": dict(zip(Spent._fields, timings, strict=True)),
        "error": {"code": error.code, "message": storable(error.message)} if error else None,
        "metadata": job.request.metadata,
    }


def is_large(outcome: Outcome) -> bool:
    """Whether the output is stored as an object of its own, with rows and webhooks naming only its address."""
    finished = outcome.finished
    return (
        outcome.state is JobState.SUCCEEDED
        and finished is not None
        and 4 * len(finished.text) > MAX_INLINE_OUTPUT_BYTES  # so that short ones need not be encoded
        and len(finished.text.encode()) > MAX_INLINE_OUTPUT_BYTES
    )


def usage_by_adapter(completions: Iterable[Completion]) -> dict[tuple[str, str, int], Used]:
    """Tokens per (tenant, adapter, version); the base model's adapter is empty and its version 0."""
    used: dict[tuple[str, str, int], Used] = {}
    for each in completions:
        if each.outcome.finished is not None:
            adapter = each.job.grant.adapter
            key = (each.job.key.tenant, adapter.name if adapter else "", adapter.version if adapter else 0)
            _add(used.setdefault(key, Used()), each.outcome.finished, each.outcome.state)
    return used


def _add(used: Used, finished: Finished, state: JobState) -> None:
    if state is JobState.SUCCEEDED:
        used.jobs += 1
        used.prompt_tokens += finished.prompt_tokens
        used.cached_tokens += finished.cached_tokens
        used.completion_tokens += finished.completion_tokens
    else:
        used.wasted_tokens += finished.completion_tokens


def logprobs_json(logprobs: list[dict[int, float]] | None) -> str | None:
    """Per generated token a map from token id to log-probability; an impossible token's is null."""
    if logprobs is None:
        return None
    rows = [{token: value if math.isfinite(value) else None for token, value in row.items()} for row in logprobs]
    return json.dumps(rows, separators=(",", ":"), allow_nan=False)


def _usage_of(finished: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "cached_tokens": finished.cached_tokens,
        "completion_tokens": finished.completion_tokens,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
