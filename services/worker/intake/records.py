"""Parses a Kafka record into a candidate, or a rejection with the reason. Pure."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from pydantic import ValidationError

from schemas.common import ErrorCode, Lane
from schemas.identity import derived_job_id, fingerprint
from schemas.job import JobRequest
from services.client.signing import SIGNATURE_HEADER, signature
from services.kafka.clients import MAX_RECORD_BYTES
from services.kafka.headers import ORIGIN, REPLAY_OF, Origin
from services.parsing.validation import sentence_of
from services.postgres.identifiers import driver_uuid
from services.process.telemetry import TRACEPARENT_HEADER
from services.worker.jobs import Candidate, JobKey, Record, Rejection
from services.worker.offsets.ledger import Partition, Place


@dataclass(frozen=True, slots=True)
class TenantKey:
    """A tenant's decrypted producer key, None if it is damaged; a disabled tenant's records are rejected."""

    key: bytes | None
    disabled: bool


def record_of(message: object, lanes: Mapping[str, Lane]) -> Record:
    """The `Record` of a message consumed with the Kafka library."""
    topic = str(message.topic)  # type: ignore[attr-defined]  # the library is untyped
    place = Place(Partition(topic, message.partition), message.offset)  # type: ignore[attr-defined]
    return Record(
        place=place,
        lane=lanes[topic],
        key=message.key,  # type: ignore[attr-defined]
        value=message.value,  # type: ignore[attr-defined]
        headers=tuple(message.headers),  # type: ignore[attr-defined]
        timestamp_ms=message.timestamp or 0,  # type: ignore[attr-defined]
    )


def parse(record: Record, cluster_id: str, received_at: float, received_ns: int) -> Candidate | Rejection:
    """Validate a record's value. A record without job_id gets an id derived from its place."""
    if record.value is None:
        return _invalid(record, "the record has no value; a job request is a JSON object")
    if len(record.value) > MAX_RECORD_BYTES:  # a compressed record may exceed the broker's bound
        found = f"the value has {len(record.value)} bytes"
        return _invalid(record, f"{found}; a job request has at most {MAX_RECORD_BYTES}")
    try:
        request = JobRequest.model_validate_json(record.value)
    except ValidationError as error:
        return _invalid(record, sentence_of(error))
    try:
        job_id = request.job_id or derived_job_id(cluster_id, *_origin(record), record.value)
    except ValueError:
        return _invalid(record, f"the header {ORIGIN!r} is not topic/partition/offset/timestamp; leave it out")
    try:
        replay_of = _replay_of(record)
    except ValueError:
        return _invalid(record, f"the header {REPLAY_OF!r} is not a UUID; leave it out")
    return Candidate(
        key=JobKey(request.tenant, driver_uuid(job_id.bytes)),
        request=request,
        fingerprint=fingerprint(request),
        record=record,
        traceparent=_text(record.header(TRACEPARENT_HEADER)) if record.headers else None,
        received_at=received_at,
        received_ns=received_ns,
        replay_of=replay_of,
    )


def _replay_of(record: Record) -> UUID | None:
    """The job that this one replays, according to its header."""
    value = record.header(REPLAY_OF) if record.headers else None
    return None if value is None else UUID(value.decode())


def _origin(record: Record) -> Origin:
    """The record's original place: a dead letter that is replayed, even twice, keeps its job id.

    A forged header can only name a job of the tenant in the record's value.
    """
    value = record.header(ORIGIN)
    place = record.place
    here = Origin(place.partition.topic, place.partition.number, place.offset, record.timestamp_ms)
    return here if value is None else Origin.parsed(value)


def authenticate(
    candidate: Candidate, tenants: Mapping[str, TenantKey], *, require_signature: bool
) -> Rejection | None:
    """Why the record is not authenticated as its tenant's; None if it is."""
    tenant = candidate.key.tenant
    known = tenants.get(tenant)
    if known is None:
        return _unauthenticated(candidate, f"no tenant {tenant!r} is registered; add it with `loraq tenants add`")
    if known.disabled:
        return _unauthenticated(candidate, f"tenant {tenant!r} is disabled")
    if not require_signature:
        return None
    sent = _text(candidate.record.header(SIGNATURE_HEADER))
    if sent is None:
        return _unauthenticated(candidate, f"the record has no {SIGNATURE_HEADER} header, which this pool requires")
    if known.key is None:
        return _unauthenticated(candidate, f"{damaged_key(tenant)}; then send it back with `loraq dlq replay`")
    expected = signature(known.key, candidate.record.value or b"")
    if hmac.compare_digest(sent.lower().encode(), expected.encode()):
        return None
    return _unauthenticated(
        candidate, f"the {SIGNATURE_HEADER} header does not match the producer key of tenant {tenant!r}"
    )


def damaged_key(tenant: str) -> str:
    """Error message for a tenant whose signatures cannot be checked."""
    return (
        f"the producer key of tenant {tenant!r} is damaged in the database, so no signature can be checked with it;"
        " restore it from a backup"
    )


def _text(value: bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if value is not None else None


def _invalid(record: Record, message: str) -> Rejection:
    return Rejection(record, ErrorCode.INVALID_MESSAGE, message)


def _unauthenticated(candidate: Candidate, message: str) -> Rejection:
    return Rejection(candidate.record, ErrorCode.UNAUTHENTICATED, message)
