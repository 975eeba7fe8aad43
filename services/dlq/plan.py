"""Plans the replay of one dead letter: the record to send, or a refusal. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from schemas.common import ErrorCode
from services.client.signing import SIGNATURE_HEADER, signature
from services.dlq.dead_letters import DeadLetter
from services.dlq.edits import Edit, why_invalid
from services.errors import InputError
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.parsing.validation import stated_identity
from services.tenants.tenants import ProducerKeys, damaged_key

NO_KEYS = ProducerKeys({}, frozenset())
FAILS_AGAIN = (ErrorCode.INVALID_MESSAGE, ErrorCode.ID_CONFLICT)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How dead letters are replayed. `topics` are the pool's job topics with their numbers of partitions.

    `producer_keys` are needed to sign edited records.
    """

    topics: Mapping[str, int]
    to_topic: str | None = None
    edit: Edit = field(default_factory=Edit)
    force: bool = False
    sign: bool = False
    require_signature: bool = False
    producer_keys: ProducerKeys | None = None


@dataclass(frozen=True, slots=True)
class RecordToSend:
    """The record to send; `partition` is None if the partitioner chooses it."""

    letter: DeadLetter
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: RawHeaders


@dataclass(frozen=True, slots=True)
class Refusal:
    """The dead letter cannot be replayed with these options; `reason` includes what to do."""

    letter: DeadLetter
    reason: str


Plan: TypeAlias = RecordToSend | Refusal


def plan(letter: DeadLetter, options: ReplayOptions) -> Plan:
    """The record to send, with the original key, headers and position, or why a replay would be useless."""
    try:
        return _record(letter, options)
    except InputError as error:
        return Refusal(letter, str(error))


def _record(letter: DeadLetter, options: ReplayOptions) -> RecordToSend:
    if letter.source is None:
        raise InputError(f"loraq did not write it: {letter.message}")
    topic = options.to_topic or letter.source.topic
    if topic not in options.topics:
        raise InputError(f"its source {topic} is not a job topic of this pool; give --lane")
    value = _value(letter, options)
    partition = letter.source.partition if letter.source.partition < options.topics[topic] else None
    return RecordToSend(letter, topic, partition, letter.key, value, _headers(letter, letter.source, options, value))


def _value(letter: DeadLetter, options: ReplayOptions) -> bytes | None:
    if options.edit.is_empty:
        return _unedited_value(letter, options)
    value = options.edit.applied(letter.value)
    if not options.force and (reason := why_invalid(value)) is not None:
        raise InputError(f"the edited value is still not a valid job request: {reason}")
    return value


def _unedited_value(letter: DeadLetter, options: ReplayOptions) -> bytes | None:
    if letter.omitted_bytes is not None:
        raise InputError(f"its value of {letter.omitted_bytes} bytes was too large to keep; give a new one with --edit")
    if letter.value is None and letter.key is None:
        raise InputError("it has neither key nor value, which Kafka clients refuse to send; give a value with --edit")
    if letter.code in FAILS_AGAIN and not options.force:
        invalid = why_invalid(letter.value)
        reason = f"still invalid: {invalid}" if invalid else "valid in this version, but its tenant's data is unknown"
        if letter.code == ErrorCode.ID_CONFLICT:
            reason = "its job_id belongs to another request; --unset job_id gives it a new id"
        raise InputError(f"unedited it would be dead-lettered again ({reason}); edit it, or give --force")
    return letter.value


def _headers(letter: DeadLetter, source: Origin, options: ReplayOptions, value: bytes | None) -> RawHeaders:
    """The original headers and those of the replay; the original position stays the same in repeated replays."""
    replaced = {names.ORIGIN, names.DEAD_LETTER}
    origin = names.last(letter.headers, names.ORIGIN)
    signatures: RawHeaders = ()
    if not options.edit.is_empty and (
        options.require_signature or names.last(letter.headers, SIGNATURE_HEADER) is not None
    ):
        signatures, replaced = _signed(letter, options, value), replaced | {SIGNATURE_HEADER}
    kept = tuple((name, content) for name, content in letter.headers if name not in replaced)
    own = ((names.ORIGIN, origin or source.encoded()), (names.DEAD_LETTER, str(letter.position).encode()))
    return (*kept, *signatures, *own)


def _signed(letter: DeadLetter, options: ReplayOptions, value: bytes | None) -> RawHeaders:
    """A signature of the edited value. Signing vouches for the record, so it needs --sign."""
    if not options.sign:
        raise InputError("its signature does not match an edited value; --sign signs it with the tenant's key")
    tenant = stated_identity(letter.key, value)[0] or ""
    keys = options.producer_keys or NO_KEYS
    if tenant in keys.damaged:
        raise InputError(f"it cannot be signed: {damaged_key(tenant)}")
    if tenant not in keys.opened:
        raise InputError(f"it cannot be signed: tenant {tenant!r} does not exist or is disabled")
    key = keys.opened[tenant]
    return ((SIGNATURE_HEADER, signature(key, value or b"").encode()),)
