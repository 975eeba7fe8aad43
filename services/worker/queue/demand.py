"""Estimates a job's `Demand` from its request. Pure: times are arguments."""

from services.worker.jobs import Job
from services.worker.queue.backlog import Demand

BYTES_PER_TOKEN = 4.0
"""Estimate for text that has not been tokenized; the charge is corrected when the job ends."""
BYTES_PER_TOKEN_ID = 6
"""Estimated size of a token id in JSON, with its comma."""
PREFIX_CHARS = 256
"""Texts whose first so many characters are equal are treated as sharing a prefix."""
COPIES = 3
"""A request is in memory three times: as received, parsed, and as sent to the engine."""


def demand_of(job: Job, prefill_weight: float, now: float, wall: float) -> Demand:
    """The demand of a job; `now` is the queue's clock, `wall` the same moment in seconds since 1970."""
    request = job.request
    num_bytes = len(job.candidate.record.value or b"")
    prompt = prompt_tokens(job)
    output = request.sampling.max_tokens
    deadline = None if request.deadline is None else now + request.deadline.timestamp() - wall
    return Demand(
        lane=job.lane,
        tenant=job.key.tenant,
        group=job.group,
        tokens=prompt + output,
        cost=prefill_weight * prompt + output,
        num_bytes=COPIES * num_bytes,
        deadline=deadline,
        prefix=_prefix(job),
    )


def prompt_tokens(job: Job) -> float:
    """Number of prompt tokens: exact for token ids, otherwise estimated from the record's size."""
    ids = job.request.prompt_token_ids
    return float(len(ids)) if ids is not None else len(job.candidate.record.value or b"") / BYTES_PER_TOKEN


def _prefix(job: Job) -> int | None:
    """Hash of tenant, adapter and the beginning of the prompt; None if the prompt is shorter than `PREFIX_CHARS`."""
    request = job.request
    beginning: object
    if request.prompt_token_ids is not None:
        beginning = tuple(request.prompt_token_ids[:PREFIX_CHARS])
        if len(request.prompt_token_ids) < PREFIX_CHARS:
            return None
    else:
        text = request.prompt or "\0".join(message.content for message in request.messages or ())
        if len(text) < PREFIX_CHARS:
            return None
        beginning = text[:PREFIX_CHARS]
    return hash((job.key.tenant, job.group, beginning))
