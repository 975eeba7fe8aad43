"""Identities derived from content: job ids for records that carry none, and request fingerprints."""

import hashlib
import json
from uuid import UUID

from schemas.job import JobRequest

_APART = {"job_id", "sampling"}
# Of plain JSON values, whose default is nothing.
_PLAIN = ("tenant", "adapter", "prompt", "prompt_token_ids", "timeout_ms", "metadata")
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def derived_job_id(cluster_id: str, topic: str, partition: int, offset: int, timestamp_ms: int, value: bytes) -> UUID:
    """UUIDv7 (RFC 9562) of a record without a job_id: the record's timestamp, then SHA-256 over where it stands.

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
    """SHA-256 of the request as sent with the adapter unresolved and without its job_id.

    Key order and defaults that are spelled out make no difference.
    """
    if request.messages or request.deadline or request.webhook:
        sent = request.model_dump(mode="json", exclude_defaults=True, exclude=_APART)
    else:  # as the model would dump it, in a third of the time
        sent = {name: value for name in _PLAIN if (value := getattr(request, name))}
    # Compared with its default as a whole, in Python, it would take longer than all the other fields.
    if sampling := request.sampling.model_dump(mode="json", exclude_defaults=True):
        sent["sampling"] = sampling
    return hashlib.sha256(_canonical.encode(sent).encode()).digest()
