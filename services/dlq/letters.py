"""A record of the dead-letter topic, read back: what came, why and from where. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from services import headers as names
from services.headers import Origin, RawHeaders
from services.validation import said_by


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

    `source` and `code` are None for a record that loraq did not put there. `omitted_bytes` is the size of a value
    that was too large to be kept. Tenant, adapter and job_id are what the record itself says, unchecked.
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
    came_with, own = _parted(tuple(message.headers))
    tenant, adapter, job_id = said_by(message.key, message.value)
    omitted = own.get(names.VALUE_OMITTED)
    return Letter(
        place=LetterPlace(message.partition, message.offset),
        put_aside_at=datetime.fromtimestamp(message.timestamp / 1000, UTC),
        code=own.get(names.ERROR_CODE),
        message=own.get(names.ERROR_MESSAGE, ""),
        source=_source(own),
        key=message.key,
        value=message.value,
        headers=came_with,
        omitted_bytes=int(omitted) if omitted else None,
        tenant=tenant,
        adapter=adapter,
        job_id=job_id,
    )


def _parted(headers: RawHeaders) -> tuple[RawHeaders, dict[str, str]]:
    """The headers that came, and loraq's own, which stand behind them beginning with the error code."""
    starts = [index for index, (name, _) in enumerate(headers) if name == names.ERROR_CODE]
    if not starts:
        return headers, {}
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[starts[-1] :]}
    return headers[: starts[-1]], own


def _source(own: dict[str, str]) -> Origin | None:
    try:
        return Origin(
            own[names.SOURCE_TOPIC],
            int(own[names.SOURCE_PARTITION]),
            int(own[names.SOURCE_OFFSET]),
            int(own.get(names.SOURCE_TIMESTAMP, "0")),
        )
    except (KeyError, ValueError):
        return None
