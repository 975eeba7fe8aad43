"""The offset ledger: which offset of each partition may be committed. Pure policy, no clock, no I/O.

Jobs finish in any order; an offset may only be committed when every record below it is finished. Records finished above
it go into the commit's metadata (`finished.py`). Records finished under an earlier assignment are remembered here and
not processed again. Memory grows with the unfinished records, not with the finished ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.offsets.finished import Finished


class Partition(NamedTuple):
    """A partition of a topic; compares equal to the Kafka library's TopicPartition."""

    topic: str
    number: int


class Place(NamedTuple):
    """Partition and offset of a record."""

    partition: Partition
    offset: int


class Standing(NamedTuple):
    """What a commit of a partition would say; `changes` later shows whether it is still complete."""

    position: int
    frontier: int
    unfinished: list[int]
    changes: int


@dataclass(slots=True)
class _Column:
    """One assigned partition: its unfinished offsets in ascending order, all below `frontier`."""

    known: Finished | None = None
    unfinished: OrderedDict[int, None] = field(default_factory=OrderedDict)
    frontier: int | None = None
    committed: int | None = None
    changes: int = 0
    saved: int = 0

    @property
    def position(self) -> int | None:
        return next(iter(self.unfinished), self.frontier)

    def receive(self, offset: int) -> bool:
        if self.frontier is not None and offset < self.frontier:
            return False
        if self.frontier is None:
            self.committed = offset
        self.frontier = offset + 1
        if self.known is not None and offset in self.known:
            self.changes += 1
            return False
        self.unfinished[offset] = None
        return True

    def finish(self, offset: int) -> bool:
        if offset not in self.unfinished:
            return False
        del self.unfinished[offset]
        self.changes += 1
        return True

    def finished(self) -> Finished | None:
        """Everything known to be finished; None if nothing is."""
        if self.frontier is None:
            return self.known
        return _joined(Finished(self.frontier, frozenset(self.unfinished)), self.known)


class Ledger:
    """Tracks the contiguous finished prefix of every assigned partition."""

    def __init__(self) -> None:
        self._columns: dict[Partition, _Column] = {}
        self._revoked: dict[Partition, _Column] = {}

    def assign(self, partitions: Iterable[Partition], told: Mapping[Partition, Finished] | None = None) -> None:
        """Start partitions: records are redelivered from the committed offset, except those known to be finished.

        `told` is what the metadata of each partition's commit says. Records that finished under an earlier assignment
        stay finished, even if another worker had the partition in between.
        """
        for partition in map(_partition, partitions):
            earlier = self._revoked.pop(partition, None) or self._columns.get(partition)
            known = earlier.finished() if earlier else None
            self._columns[partition] = _Column(_joined((told or {}).get(partition), known))

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Drop partitions; records of theirs that finish later are only remembered."""
        for partition in map(_partition, partitions):
            if (column := self._columns.pop(partition, None)) is not None:
                self._revoked[partition] = column

    def forget(self, partition: Partition) -> int | None:
        """Forget everything about a partition; returns how many of its changes were committed, None if it is unknown."""
        earlier = (self._revoked.pop(partition, None), self._columns.pop(partition, None))
        return max((column.saved for column in earlier if column is not None), default=None)

    def restart(self, partition: Partition, position: int) -> None:
        """Continue a partition at `position` and forget everything else: its earlier offsets are gone or denote new records."""
        self._revoked.pop(partition, None)
        if partition in self._columns:
            self._columns[partition] = _Column(frontier=position)

    @property
    def partitions(self) -> frozenset[Partition]:
        """The assigned partitions."""
        return frozenset(self._columns)

    def receive(self, place: Place) -> bool:
        """Add a record; returns whether it is to be processed.

        It is not if its partition is not assigned, it was added before, or it is known to be finished.
        """
        column = self._columns.get(place.partition)
        return column is not None and column.receive(place.offset)

    def finish(self, place: Place) -> bool:
        """Mark a record as finished; returns False if it is not open under the current assignment."""
        column = self._columns.get(place.partition)
        if column is not None:
            return column.finish(place.offset)
        if (revoked := self._revoked.get(place.partition)) is not None:
            revoked.finish(place.offset)
        return False

    def holds(self, place: Place) -> bool:
        """Whether the record was added under the current assignment and is not finished."""
        column = self._columns.get(place.partition)
        return column is not None and place.offset in column.unfinished

    def due(self) -> dict[Partition, int]:
        """Positions that have moved since the last commit."""
        return {
            partition: column.position
            for partition, column in self._columns.items()
            if column.position is not None and column.position != column.committed
        }

    def unsaved(self) -> set[Partition]:
        """Partitions with records that have finished since the last commit."""
        return {partition for partition, column in self._columns.items() if column.changes != column.saved}

    def standing(self, partition: Partition) -> Standing:
        """What a commit of this partition says now; it must have received a record."""
        column = self._columns[partition]
        finished = column.finished()
        assert column.position is not None, "there is nothing to commit before the first record"
        assert finished is not None, "a position comes with what is finished"
        return Standing(column.position, finished.frontier, sorted(finished.unfinished), column.changes)

    def committed(self, positions: Mapping[Partition, int], changes: Mapping[Partition, int] | None = None) -> None:
        """Note what the broker acknowledged; partitions revoked meanwhile are ignored.

        `changes` is that of the commit, so that records finished after it still count as unsaved.
        """
        for partition, position in positions.items():
            column = self._columns.get(partition)
            if column is not None:
                column.committed = max(position, column.committed or 0)
                column.saved = max(column.saved, (changes or {}).get(partition, 0))

    def num_open(self, topic: str) -> int:
        """Number of unfinished records of a topic."""
        return sum(len(column.unfinished) for partition, column in self._columns.items() if partition.topic == topic)

    def position(self, partition: Partition) -> int | None:
        """Offset of the oldest unfinished record, or the next offset; None before the first record."""
        column = self._columns.get(partition)
        return column.position if column else None

    def next_offset(self, partition: Partition) -> int | None:
        """The lowest offset that `receive` accepts; None before the first record."""
        column = self._columns.get(partition)
        return column.frontier if column else None

    def finished_above(self, partition: Partition) -> list[int]:
        """Finished offsets above the committable prefix, ascending."""
        column = self._columns[partition]
        if column.position is None or column.frontier is None:
            return []
        return [offset for offset in range(column.position, column.frontier) if offset not in column.unfinished]


def _joined(one: Finished | None, other: Finished | None) -> Finished | None:
    return one.joined(other) if one and other else one or other


def _partition(pair: Partition) -> Partition:
    """Convert the Kafka library's TopicPartition."""
    return Partition(*pair)
