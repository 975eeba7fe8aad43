"""Parses records of the dead-letter topic: the original record, the reason and the source. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from services.client.identifiers import datetime_of
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.parsing.validation import shown, stated_identity


class DeadLetterPosition(NamedTuple):
    """Where a dead letter is in the dead-letter topic, written `partition:offset`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parsed(cls, text: str) -> "DeadLetterPosition":
        """The inverse of `str`; raises ValueError."""
        partition, offset = text.split(":")
        return cls(int(partition), int(offset))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter, with key, value and headers of the original record.

    `source` and `code` are None for a record that loraq did not write; `message` then names the missing or malformed
    header. `omitted_bytes` is the size of a value that was too large to keep. Tenant, adapter and job_id are those that
    the record states, unverified.
    """

    position: DeadLetterPosition
    dead_lettered_at: datetime
    code: str | None
    message: str
    source: Origin | None
    key: bytes | None
    value: bytes | None
    headers: RawHeaders
    omitted_bytes: int | None
    tenant: str | None
    adapter: str | None
    job_id: str | None


def dead_letter_of(message: Any) -> DeadLetter:
    """The dead letter in a message of the Kafka library."""
    tenant, adapter, job_id = stated_identity(message.key, message.value)
    headers, rejection = _split(tuple(message.headers))
    return DeadLetter(
        position=DeadLetterPosition(message.partition, message.offset),
        dead_lettered_at=datetime_of(message.timestamp),
        code=rejection.code,
        message=rejection.message,
        source=rejection.source,
        key=message.key,
        value=message.value,
        headers=headers,
        omitted_bytes=rejection.omitted_bytes,
        tenant=tenant,
        adapter=adapter,
        job_id=job_id,
    )


@dataclass(frozen=True, slots=True)
class _Rejection:
    """The content of loraq's own headers."""

    code: str | None
    message: str
    source: Origin | None = None
    omitted_bytes: int | None = None


def _split(headers: RawHeaders) -> tuple[RawHeaders, _Rejection]:
    """The record's original headers, and the content of loraq's own, which follow and start with the error code."""
    starts = [index for index, (name, _) in enumerate(headers) if name == names.ERROR_CODE]
    if not starts:
        return headers, _Rejection(None, f"it has no {names.ERROR_CODE} header")
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[starts[-1] :]}
    try:
        return headers[: starts[-1]], _rejection(own)
    except ValueError as error:
        return headers, _Rejection(None, str(error))


def _rejection(own: Mapping[str, str]) -> _Rejection:
    """The parsed headers; raises ValueError naming one that loraq does not write like that."""
    if not own.get(names.SOURCE_TOPIC):
        raise ValueError(f"it has no {names.SOURCE_TOPIC} header")
    source = Origin(
        own[names.SOURCE_TOPIC],
        _number(own, names.SOURCE_PARTITION),
        _number(own, names.SOURCE_OFFSET),
        _number(own, names.SOURCE_TIMESTAMP, minimum=-1) if names.SOURCE_TIMESTAMP in own else 0,
    )
    omitted_bytes = _number(own, names.VALUE_OMITTED) if names.VALUE_OMITTED in own else None
    return _Rejection(own[names.ERROR_CODE], own.get(names.ERROR_MESSAGE, ""), source, omitted_bytes)


def _number(own: Mapping[str, str], name: str, minimum: int = 0) -> int:
    text = own.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or int(text) < minimum:
        raise ValueError(f"its header {name} must be a number of at least {minimum} (got {shown(text)})")
    return int(text)
