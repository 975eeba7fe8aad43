"""Headers that loraq writes on records: why a record was dead-lettered, where it came from, and what it replays."""

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
"""On a replayed record: its first location, `topic/partition/offset/timestamp`."""
DEAD_LETTER = "loraq-dead-letter"
"""On a replayed record: the dead letter that it was sent from, `partition:offset`."""

REPLAY_OF = "loraq-replay-of"
"""On the record of a job that replays another: the job_id of the replayed job."""

RawHeaders = tuple[tuple[str, bytes | None], ...]


class Origin(NamedTuple):
    """The first location of a record; the timestamp is the broker's, in milliseconds since 1970."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    def encoded(self) -> bytes:
        """The value of the header."""
        return "/".join(map(str, self)).encode()

    @classmethod
    def parsed(cls, content: bytes) -> "Origin":
        """The inverse of `encoded`; raises ValueError if malformed."""
        topic, partition, offset, timestamp_ms = content.decode().split("/")
        return cls(topic, int(partition), int(offset), int(timestamp_ms))


def last(headers: RawHeaders, name: str) -> bytes | None:
    """The last header of that name: duplicates are legal, and the last one was added closest to the broker."""
    return next((value for key, value in reversed(headers) if key == name), None)
