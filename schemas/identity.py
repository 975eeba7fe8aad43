"""Identities derived from content: ids for records without a job_id, and request fingerprints."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any
from uuid import UUID

from schemas.job import SAMPLING_SCALARS, JobRequest, Sampling, sampling_scalars

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def derived_job_id(cluster_id: str, topic: str, partition: int, offset: int, timestamp_ms: int, value: bytes) -> UUID:
    """UUIDv7 (RFC 9562) of a record without a job_id: its timestamp, then SHA-256 over its position and value.

    The same record always gets the same id, so a redelivery is recognised.
    """
    digest = hashlib.sha256()
    place = (cluster_id, topic, str(partition), str(offset), str(timestamp_ms))
    for part in (*(text.encode() for text in place), value):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    random = int.from_bytes(digest.digest()[:10], "big")
    timestamp = max(timestamp_ms, 0) & (2**48 - 1)
    rand_a, rand_b = random >> 68 & 0xFFF, random & (2**62 - 1)
    return UUID(int=timestamp << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b)


def fingerprint(request: JobRequest) -> bytes:
    """SHA-256 of the request as sent, with the adapter unresolved and without the job_id.

    Key order and explicit defaults make no difference.
    """
    if request.messages or request.deadline or request.webhook:
        text = _canonical(request.model_dump(mode="json", exclude_defaults=True, exclude={"job_id"}))
    else:
        text = f"{{{','.join(_members(request))}}}"
    return hashlib.sha256(text.encode()).digest()


def _members(request: JobRequest) -> Iterator[str]:
    """The same members that the model would dump, in order of their names, in a third of the time."""
    if request.adapter:
        yield f'"adapter":{_quoted(request.adapter)}'
    if request.metadata:
        yield f'"metadata":{_canonical(request.metadata)}'
    if request.prompt:
        yield f'"prompt":{_quoted(request.prompt)}'
    if request.prompt_token_ids:
        yield f'"prompt_token_ids":{_canonical(request.prompt_token_ids)}'
    if sampling := _sampling_json(tuple(request.sampling.stop), *sampling_scalars(request.sampling)):
        yield f'"sampling":{sampling}'
    yield f'"tenant":{_quoted(request.tenant)}'
    if request.timeout_ms:
        yield f'"timeout_ms":{request.timeout_ms}'


@lru_cache(maxsize=1024)
def _sampling_json(stop: tuple[str, ...], *scalars: Any) -> str:
    """JSON of the values that differ from the defaults; cached, because most requests use the same ones."""
    sampling = Sampling(stop=list(stop), **dict(zip(SAMPLING_SCALARS, scalars, strict=True)))
    changed = sampling.model_dump(mode="json", exclude_defaults=True)
    return _canonical(changed) if changed else ""
