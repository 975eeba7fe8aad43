"""When to commit which offsets. Pure policy: `now` is monotonic seconds."""

from collections.abc import Collection
from typing import NamedTuple

from services.worker.offsets.finished import MAX_METADATA_CHARS, fit
from services.worker.offsets.ledger import Ledger, Partition

ABOVE_EVERY_S = 1.0


class Commit(NamedTuple):
    """Offset and metadata to commit for a partition; `changes` is passed to the ledger after the acknowledgement."""

    position: int
    metadata: str
    changes: int


class Commits:
    """Decides what to commit: a position that moved at once, finished records above it every `every_s` seconds.

    If the finished records above a position do not fit into the commit's metadata, the partition is `crowded`: it is
    paused until they fit again.
    """

    def __init__(self, ledger: Ledger, every_s: float = ABOVE_EVERY_S, max_chars: int = MAX_METADATA_CHARS) -> None:
        self._ledger = ledger
        self._every_s = every_s
        self._max_chars = max_chars
        self._acknowledged_at: dict[Partition, float] = {}
        self._crowded: set[Partition] = set()

    @property
    def crowded(self) -> frozenset[Partition]:
        """Partitions to pause."""
        return frozenset(self._crowded & self._ledger.partitions)

    def due(self, now: float, assigned: Collection[Partition], *, urgent: bool = False) -> dict[Partition, Commit]:
        """What to commit now; with `urgent`, everything that is not committed yet."""
        moved, unsaved = set(self._ledger.due()), self._ledger.unsaved()
        overdue = {each for each in unsaved if urgent or now - self._acknowledged_at.get(each, 0.0) >= self._every_s}
        return {partition: self._commit(partition) for partition in (moved | overdue) if partition in assigned}

    def _commit(self, partition: Partition) -> Commit:
        position, frontier, unfinished, changes = self._ledger.commit_state(partition)
        metadata, complete = fit(position, frontier, unfinished, self._max_chars)
        if complete:
            self._crowded.discard(partition)
        else:
            self._crowded.add(partition)
        return Commit(position, metadata, changes)

    def halve_metadata(self) -> None:
        """Halve the metadata limit: the broker accepts less than was assumed."""
        self._max_chars //= 2

    def acknowledged(self, commits: dict[Partition, Commit], now: float) -> None:
        """Note commits that the broker acknowledged."""
        positions = {partition: commit.position for partition, commit in commits.items()}
        self._ledger.committed(positions, {partition: commit.changes for partition, commit in commits.items()})
        self._acknowledged_at |= dict.fromkeys(commits, now)
