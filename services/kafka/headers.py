"""Headers that loraq itself writes on records: why one was put aside, where it stood, and what it replays."""

from typing import NamedTuple

ERROR_CODE = "loraq-error-code"
ERROR_MESSAGE = "loraq-error-message"
SOURCE_TOPIC = "loraq-source-topic"
SOURCE_PARTITION = "loraq-source-partition"
SOURCE_OFFSET = "loraq-source-offset"
SOURCE_TIMESTAMP = "loraq-source-timestamp"
VALUE_OMITTED = "loraq-value-omitted"
VALUE_SHA256 = "loraq-value-sha256"
ORIGIN = "loraq-origin"
"""On a replayed record: where it first stood, `topic/partition/offset/timestamp`."""
DEAD_LETTER = "loraq-dead-letter"
"""On a replayed record: the dead letter that it was made from, `partition:offset`."""

REPLAY_OF = "loraq-replay-of"
"""On the record of a job that replays another: that one's job_id."""

RawHeaders = tuple[tuple[str, bytes | None], ...]


class Origin(NamedTuple):
    """Where a record first stood; the timestamp is the broker's, milliseconds since 1970."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    def encoded(self) -> bytes:
        """The content of the header."""
        return "/".join(map(str, self)).encode()

    @classmethod
    def parsed(cls, content: bytes) -> "Origin":
        """The inverse of `encoded`; raises ValueError."""
        topic, partition, offset, timestamp_ms = content.decode().split("/")
        return cls(topic, int(partition), int(offset), int(timestamp_ms))


def last(headers: RawHeaders, name: str) -> bytes | None:
    """The last header of that name: duplicates are legal, and the last writer stood nearest to the broker."""
    return next((value for key, value in reversed(headers) if key == name), None)
