"""Prefix cache keys: two KV blocks have the same key only if their keys and values were computed from the same input.

A key is SHA-256 over the previous block's key and the block's own tokens. The key before the first block covers tenant,
base model and adapter. Every part is labelled and length-prefixed, so different inputs never hash the same bytes.
"""

import hashlib
from array import array
from collections.abc import Sequence

from engine.types import BlockKey

SCOPE, BLOCK = b"loraq scope 1", b"loraq block 1"


def scope_key(tenant: str, base: bytes, adapter_digest: str | None) -> BlockKey:
    """The key before the first block, of a tenant and its weights; without an adapter digest, of the base model."""
    adapter = (b"base", b"") if adapter_digest is None else (b"adapter", adapter_digest.encode())
    return _digest(SCOPE, (b"tenant", tenant.encode()), (b"model", base), adapter)


def block_key(previous: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the block that follows `previous` and contains these tokens."""
    return _digest(BLOCK, (b"previous", previous), (b"tokens", array("q", token_ids).tobytes()))


def _digest(kind: bytes, *parts: tuple[bytes, bytes]) -> BlockKey:
    framed = [kind]
    for name, content in parts:
        framed += (len(name).to_bytes(8, "big"), name, len(content).to_bytes(8, "big"), content)
    return BlockKey(hashlib.sha256(b"".join(framed)).digest())
