"""Fresh identifiers that sort by time."""

import os
import time
from uuid import UUID


def uuid7(now_ms: int | None = None) -> UUID:
    """A random UUIDv7 (RFC 9562); `now_ms` is milliseconds since 1970."""
    timestamp = (time.time_ns() // 1_000_000 if now_ms is None else now_ms) & (2**48 - 1)
    random = int.from_bytes(os.urandom(10), "big")
    rand_a, rand_b = random >> 68, random & (2**62 - 1)
    return UUID(int=timestamp << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b)
