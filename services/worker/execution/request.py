"""Converts a job to an engine request."""

from functools import lru_cache
from typing import Any

from engine import Request, SamplingParams
from schemas.job import SAMPLING_SCALARS, JobRequest, Sampling, sampling_scalars
from services.worker.jobs import BASE_GROUP, Job


def engine_request(job: Job, request_id: str, displaces: str | None = None) -> Request:
    """The engine request of a job; raises the engine's InvalidRequestError."""
    request: JobRequest = job.request
    return Request(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        prompt=request.prompt,
        messages=None if request.messages is None else [message.model_dump() for message in request.messages],
        adapter=None if job.group == BASE_GROUP else job.group,
        sampling=_sampling_params(request.sampling),
        tenant=request.tenant,
        displaces=displaces,
    )


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return _shared_params(*sampling_scalars(sampling), tuple(sampling.stop))


@lru_cache(maxsize=1024)
def _shared_params(*values: Any) -> SamplingParams:
    """Shared between jobs with the same parameters: one object is validated once and pickled once per batch."""
    return SamplingParams(**dict(zip((*SAMPLING_SCALARS, "stop"), values, strict=True)))
