"""Fresh identifiers that sort by time."""

import os
import time
from uuid import UUID

from asyncpg.pgproto import pgproto


def driver_uuid(body: bytes) -> UUID:
    """A UUID of 16 bytes as the database client makes them: its text, hash and encoding cost a fifth."""
    made: UUID = pgproto.UUID(body)
    return made


def uuid7(now_ms: int | None = None) -> UUID:
    """A random UUIDv7 (RFC 9562); `now_ms` is milliseconds since 1970."""
    timestamp = (time.time_ns() // 1_000_000 if now_ms is None else now_ms) & (2**48 - 1)
    body = bytearray(timestamp.to_bytes(6, "big") + os.urandom(10))
    body[6] = body[6] & 0x0F | 0x70
    body[8] = body[8] & 0x3F | 0x80
    return driver_uuid(bytes(body))
