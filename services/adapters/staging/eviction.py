"""Which adapters leave the disk cache. Pure: no files, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One adapter on disk. `last_used` is seconds on any one clock."""

    digest: str
    size_bytes: int
    last_used: float
    in_use: bool = False


def plan_eviction(entries: Iterable[Entry], incoming_bytes: int, budget_bytes: int) -> tuple[Entry, ...] | None:
    """The entries to evict so that `incoming_bytes` more fit: idle ones, least recently used first, as few as do.

    None if even without every idle entry there is no room.
    """
    held = list(entries)
    excess = sum(entry.size_bytes for entry in held) + incoming_bytes - budget_bytes
    victims: list[Entry] = []
    idle = sorted((entry for entry in held if not entry.in_use), key=lambda entry: (entry.last_used, entry.digest))
    for entry in idle:
        if excess <= 0:
            break
        victims.append(entry)
        excess -= entry.size_bytes
    return tuple(victims) if excess <= 0 else None
