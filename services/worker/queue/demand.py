"""What the queue's policy knows of a job, from its request alone. Pure: times are arguments."""

from services.worker.jobs import Job
from services.worker.queue.backlog import Demand

BYTES_PER_TOKEN = 4.0
"""Of text that has not been tokenized; corrected when the job ends."""
BYTES_PER_TOKEN_ID = 6
"""Of a token id in JSON, its comma included."""
PREFIX_CHARS = 256
"""Texts that agree in so many characters of their beginning are taken to share a prefix."""
COPIES = 3
"""A request is in memory as it came, as a model and on its way to the engine."""


def demand_of(job: Job, prefill_weight: float, now: float, wall: float) -> Demand:
    """`now` is the queue's clock, `wall` seconds since 1970 at the same moment."""
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
    """Tokens of the prompt: counted where it came as ids, estimated from its bytes elsewhere."""
    ids = job.request.prompt_token_ids
    return float(len(ids)) if ids is not None else len(job.candidate.record.value or b"") / BYTES_PER_TOKEN


def _prefix(job: Job) -> int | None:
    """A hash of the text's beginning, of the tenant and the adapter; None for texts too short to be worth a look."""
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
