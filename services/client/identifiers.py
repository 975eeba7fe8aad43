"""New identifiers that sort by time, and the times in identifiers and records."""

import os
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def datetime_of(milliseconds: int) -> datetime:
    """The datetime of a Unix time in milliseconds, clamped to the years 1 to 9999.

    Ids and records come from producers and may contain any time.
    """
    try:
        return EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return FIRST if milliseconds < 0 else LAST


def uuid7(now_ms: int | None = None) -> UUID:
    """A random UUIDv7 (RFC 9562); `now_ms` is milliseconds since 1970."""
    return UUID(bytes=uuid7_bytes(now_ms))


def uuid7_bytes(now_ms: int | None = None) -> bytes:
    """The 16 bytes of a random UUIDv7."""
    timestamp = (time.time_ns() // 1_000_000 if now_ms is None else now_ms) & (2**48 - 1)
    body = bytearray(timestamp.to_bytes(6, "big") + os.urandom(10))
    body[6] = body[6] & 0x0F | 0x70
    body[8] = body[8] & 0x3F | 0x80
    return bytes(body)
