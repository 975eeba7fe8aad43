"""What becomes of one dead letter that is to be sent back. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from schemas.common import ErrorCode
from services.client.signing import SIGNATURE_HEADER, signature
from services.dlq.dead_letters import Letter
from services.dlq.edits import Edit, why_invalid
from services.errors import InputError
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.parsing.validation import said_by
from services.tenants.tenants import ProducerKeys, damaged_key

NO_KEYS = ProducerKeys({}, frozenset())
FAIL_AGAIN = (ErrorCode.INVALID_MESSAGE, ErrorCode.ID_CONFLICT)


@dataclass(frozen=True, slots=True)
class Order:
    """How letters are to be sent back. `topics` are the pool's job topics with the number of partitions of each.

    `producer_keys` are there where edited letters are to be signed anew.
    """

    topics: Mapping[str, int]
    to_topic: str | None = None
    edit: Edit = field(default_factory=Edit)
    force: bool = False
    sign: bool = False
    demands_signature: bool = False
    producer_keys: ProducerKeys | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """The record to send; `partition` is None where the partitioner chooses."""

    letter: Letter
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: RawHeaders


@dataclass(frozen=True, slots=True)
class Refuse:
    """The letter cannot be sent back like this; the reason says what to do."""

    letter: Letter
    reason: str


Plan: TypeAlias = Send | Refuse


def plan(letter: Letter, order: Order) -> Plan:
    """The record as it came with its key and headers and where it first stood, or why that would be useless."""
    try:
        return _send(letter, order)
    except InputError as error:
        return Refuse(letter, str(error))


def _send(letter: Letter, order: Order) -> Send:
    if letter.source is None:
        raise InputError(f"loraq did not put it there: {letter.message}")
    topic = order.to_topic or letter.source.topic
    if topic not in order.topics:
        raise InputError(f"it came from {topic}, which is no job topic of this pool; say --lane")
    value = _value(letter, order)
    partition = letter.source.partition if letter.source.partition < order.topics[topic] else None
    return Send(letter, topic, partition, letter.key, value, _headers(letter, letter.source, order, value))


def _value(letter: Letter, order: Order) -> bytes | None:
    if not order.edit.changes:
        return _as_it_came(letter, order)
    value = order.edit.applied(letter.value)
    if not order.force and (wrong := why_invalid(value)) is not None:
        raise InputError(f"edited like this it is still no valid job request: {wrong}")
    return value


def _as_it_came(letter: Letter, order: Order) -> bytes | None:
    if letter.omitted_bytes is not None:
        raise InputError(f"its value, {letter.omitted_bytes} bytes, was too large to be kept; give another with --edit")
    if letter.value is None and letter.key is None:
        raise InputError("it has neither key nor value, which Kafka's clients refuse to send; give a value with --edit")
    if letter.code in FAIL_AGAIN and not order.force:
        wrong = why_invalid(letter.value)
        now = f"still invalid: {wrong}" if wrong else "valid by this version as far as can be seen without its tenant"
        if letter.code == ErrorCode.ID_CONFLICT:
            now = "its job_id belongs to another request; --unset job_id gives it an id of its own"
        raise InputError(f"as it came it would be put aside again ({now}); edit it, or say --force")
    return letter.value


def _headers(letter: Letter, source: Origin, order: Order, value: bytes | None) -> RawHeaders:
    """Those that came; where the record first stood stays what it was through any number of replays."""
    replaced = {names.ORIGIN, names.DEAD_LETTER}
    first = names.last(letter.headers, names.ORIGIN)
    signatures: RawHeaders = ()
    if order.edit.changes and (order.demands_signature or names.last(letter.headers, SIGNATURE_HEADER) is not None):
        signatures, replaced = _signed(letter, order, value), replaced | {SIGNATURE_HEADER}
    kept = tuple((name, content) for name, content in letter.headers if name not in replaced)
    own = ((names.ORIGIN, first or source.encoded()), (names.DEAD_LETTER, str(letter.place).encode()))
    return (*kept, *signatures, *own)


def _signed(letter: Letter, order: Order, value: bytes | None) -> RawHeaders:
    """A signature of the edited value. To sign is to vouch for the record, so it is done when asked for only."""
    if not order.sign:
        raise InputError("its signature does not hold for an edited value; --sign makes one in the tenant's name")
    tenant = said_by(letter.key, value)[0] or ""
    keys = order.producer_keys or NO_KEYS
    if tenant in keys.damaged:
        raise InputError(f"it cannot be signed: {damaged_key(tenant)}")
    if tenant not in keys.opened:
        raise InputError(f"it cannot be signed: there is no active tenant {tenant!r}")
    key = keys.opened[tenant]
    return ((SIGNATURE_HEADER, signature(key, value or b"").encode()),)
