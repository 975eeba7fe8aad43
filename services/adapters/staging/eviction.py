"""Chooses which adapters to evict from the disk cache. Pure: no files, no clock."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One adapter on disk. `last_used` is in seconds, on the same clock for all entries."""

    digest: str
    size_bytes: int
    last_used: float
    in_use: bool = False


def plan_eviction(entries: Iterable[Entry], incoming_bytes: int, budget_bytes: int) -> tuple[Entry, ...] | None:
    """The fewest idle entries to evict so that `incoming_bytes` more fit, least recently used first.

    None if there is not enough room even without all idle entries.
    """
    present = list(entries)
    excess = sum(entry.size_bytes for entry in present) + incoming_bytes - budget_bytes
    victims: list[Entry] = []
    idle = sorted((entry for entry in present if not entry.in_use), key=lambda entry: (entry.last_used, entry.digest))
    for entry in idle:
        if excess <= 0:
            break
        victims.append(entry)
        excess -= entry.size_bytes
    return tuple(victims) if excess <= 0 else None
