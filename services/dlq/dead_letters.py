"""A record of the dead-letter topic, read back: what came, why and from where. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from services.client.identifiers import moment_of
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.parsing.validation import said_by, shown


class LetterPlace(NamedTuple):
    """Where a dead letter lies in the dead-letter topic; people write it `partition:offset`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parsed(cls, text: str) -> "LetterPlace":
        """The inverse of `str`; raises ValueError."""
        partition, offset = text.split(":")
        return cls(int(partition), int(offset))


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. Key, value and headers are those of the record as it came.

    `source` and `code` are None for a record that loraq did not put there; its message says how that is known.
    `omitted_bytes` is the size of a value that was too large to be kept. Tenant, adapter and job_id are what the record
    itself says, unchecked.
    """

    place: LetterPlace
    put_aside_at: datetime
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


def letter_of(message: Any) -> Letter:
    """The letter that a message of the Kafka library is."""
    tenant, adapter, job_id = said_by(message.key, message.value)
    came_with, why = _parted(tuple(message.headers))
    return Letter(
        place=LetterPlace(message.partition, message.offset),
        put_aside_at=moment_of(message.timestamp),
        code=why.code,
        message=why.message,
        source=why.source,
        key=message.key,
        value=message.value,
        headers=came_with,
        omitted_bytes=why.omitted_bytes,
        tenant=tenant,
        adapter=adapter,
        job_id=job_id,
    )


@dataclass(frozen=True, slots=True)
class _Why:
    """What loraq's own headers say."""

    code: str | None
    message: str
    source: Origin | None = None
    omitted_bytes: int | None = None


def _parted(headers: RawHeaders) -> tuple[RawHeaders, _Why]:
    """The headers that came, and what loraq's own say, which stand behind them beginning with the error code."""
    starts = [index for index, (name, _) in enumerate(headers) if name == names.ERROR_CODE]
    if not starts:
        return headers, _Why(None, f"it has no {names.ERROR_CODE} header")
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[starts[-1] :]}
    try:
        return headers[: starts[-1]], _why(own)
    except ValueError as error:
        return headers, _Why(None, str(error))


def _why(own: Mapping[str, str]) -> _Why:
    """Raises ValueError naming the header that loraq would not have written like that."""
    if not own.get(names.SOURCE_TOPIC):
        raise ValueError(f"it has no {names.SOURCE_TOPIC} header")
    source = Origin(
        own[names.SOURCE_TOPIC],
        _number(own, names.SOURCE_PARTITION),
        _number(own, names.SOURCE_OFFSET),
        _number(own, names.SOURCE_TIMESTAMP, least=-1) if names.SOURCE_TIMESTAMP in own else 0,
    )
    omitted_bytes = _number(own, names.VALUE_OMITTED) if names.VALUE_OMITTED in own else None
    return _Why(own[names.ERROR_CODE], own.get(names.ERROR_MESSAGE, ""), source, omitted_bytes)


def _number(own: Mapping[str, str], name: str, least: int = 0) -> int:
    text = own.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,19}", text) or int(text) < least:
        raise ValueError(f"its header {name} should be a number of at least {least} (got {shown(text)})")
    return int(text)
