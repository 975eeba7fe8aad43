"""Names of KV blocks: two blocks share a name only if whatever their keys and values were computed from is the same.

A key is SHA-256 over the key of the block before it and the tokens of its own block; the first one's predecessor covers
tenant, base model and adapter. Every part is typed and framed by its length, so no two of them can run together.
"""

import hashlib
from array import array
from collections.abc import Sequence

from engine.types import BlockKey

SCOPE, BLOCK = b"loraq scope 1", b"loraq block 1"


def scope_key(tenant: str, base: bytes, adapter_digest: str | None) -> BlockKey:
    """What precedes the first block: whose it is, and of which weights. None is the base model alone."""
    adapter = (b"base", b"") if adapter_digest is None else (b"adapter", adapter_digest.encode())
    return _digest(SCOPE, (b"tenant", tenant.encode()), (b"model", base), adapter)


def block_key(previous: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the block that follows `previous` and holds these tokens."""
    return _digest(BLOCK, (b"previous", previous), (b"tokens", array("q", token_ids).tobytes()))


def _digest(kind: bytes, *parts: tuple[bytes, bytes]) -> BlockKey:
    framed = [kind]
    for name, content in parts:
        framed += (len(name).to_bytes(8, "big"), name, len(content).to_bytes(8, "big"), content)
    return BlockKey(hashlib.sha256(b"".join(framed)).digest())
