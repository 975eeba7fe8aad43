"""The offset ledger: which offset of each partition may be committed. Pure policy, no clock, no I/O.

Jobs finish in any order; an offset may only be committed when every record below it is finished. Records finished above
it go into the commit's metadata (`finished.py`). Records finished under an earlier assignment are remembered here and
not processed again. Memory grows with the unfinished records, not with the finished ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.offsets.finished import FinishedOffsets


class Partition(NamedTuple):
    """A partition of a topic; compares equal to the Kafka library's TopicPartition."""

    topic: str
    number: int


class Place(NamedTuple):
    """Partition and offset of a record."""

    partition: Partition
    offset: int


class CommitState(NamedTuple):
    """What a commit of a partition would contain; `changes` shows later whether it is still complete."""

    position: int
    frontier: int
    unfinished: list[int]
    changes: int


@dataclass(slots=True)
class _PartitionState:
    """One assigned partition: its unfinished offsets in ascending order, all below `frontier`."""

    known: FinishedOffsets | None = None
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

    def finished(self) -> FinishedOffsets | None:
        """Everything known to be finished; None if nothing is."""
        if self.frontier is None:
            return self.known
        return _union(FinishedOffsets(self.frontier, frozenset(self.unfinished)), self.known)


class Ledger:
    """Tracks the contiguous finished prefix of every assigned partition."""

    def __init__(self) -> None:
        self._assigned: dict[Partition, _PartitionState] = {}
        self._revoked: dict[Partition, _PartitionState] = {}

    def assign(
        self, partitions: Iterable[Partition], committed: Mapping[Partition, FinishedOffsets] | None = None
    ) -> None:
        """Start partitions: records are redelivered from the committed offset, except those known to be finished.

        `committed` is decoded from the metadata of each partition's commit. Records that finished under an earlier
        assignment stay finished, even if another worker had the partition in between.
        """
        for partition in map(_partition, partitions):
            earlier = self._revoked.pop(partition, None) or self._assigned.get(partition)
            known = earlier.finished() if earlier else None
            self._assigned[partition] = _PartitionState(_union((committed or {}).get(partition), known))

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Drop partitions; records of these that finish later are remembered but not committed."""
        for partition in map(_partition, partitions):
            if (state := self._assigned.pop(partition, None)) is not None:
                self._revoked[partition] = state

    def forget(self, partition: Partition) -> int | None:
        """Forget a partition; returns how many of its changes were committed, None if it is unknown."""
        earlier = (self._revoked.pop(partition, None), self._assigned.pop(partition, None))
        return max((state.saved for state in earlier if state is not None), default=None)

    def restart(self, partition: Partition, position: int) -> None:
        """Continue a partition at `position` and forget the rest: earlier offsets are gone or denote new records."""
        self._revoked.pop(partition, None)
        if partition in self._assigned:
            self._assigned[partition] = _PartitionState(frontier=position)

    @property
    def partitions(self) -> frozenset[Partition]:
        """The assigned partitions."""
        return frozenset(self._assigned)

    def receive(self, place: Place) -> bool:
        """Add a record; returns whether it is to be processed.

        It is not if its partition is not assigned, it was added before, or it is known to be finished.
        """
        state = self._assigned.get(place.partition)
        return state is not None and state.receive(place.offset)

    def finish(self, place: Place) -> bool:
        """Mark a record as finished; returns False if it is not open under the current assignment."""
        state = self._assigned.get(place.partition)
        if state is not None:
            return state.finish(place.offset)
        if (revoked := self._revoked.get(place.partition)) is not None:
            revoked.finish(place.offset)
        return False

    def is_open(self, place: Place) -> bool:
        """Whether the record was added under the current assignment and is not finished."""
        state = self._assigned.get(place.partition)
        return state is not None and place.offset in state.unfinished

    def due(self) -> dict[Partition, int]:
        """Positions that have moved since the last commit."""
        return {
            partition: state.position
            for partition, state in self._assigned.items()
            if state.position is not None and state.position != state.committed
        }

    def unsaved(self) -> set[Partition]:
        """Partitions with records that have finished since the last commit."""
        return {partition for partition, state in self._assigned.items() if state.changes != state.saved}

    def commit_state(self, partition: Partition) -> CommitState:
        """What a commit of this partition would contain now; the partition must have received a record."""
        state = self._assigned[partition]
        finished = state.finished()
        assert state.position is not None, "there is nothing to commit before the first record"
        assert finished is not None, "a partition with a position has finished offsets"
        return CommitState(state.position, finished.frontier, sorted(finished.unfinished), state.changes)

    def committed(self, positions: Mapping[Partition, int], changes: Mapping[Partition, int] | None = None) -> None:
        """Note what the broker acknowledged; partitions revoked meanwhile are ignored.

        `changes` is that of the commit, so that records finished after it still count as unsaved.
        """
        for partition, position in positions.items():
            state = self._assigned.get(partition)
            if state is not None:
                state.committed = max(position, state.committed or 0)
                state.saved = max(state.saved, (changes or {}).get(partition, 0))

    def num_open(self, topic: str) -> int:
        """Number of unfinished records of a topic."""
        return sum(len(state.unfinished) for partition, state in self._assigned.items() if partition.topic == topic)

    def position(self, partition: Partition) -> int | None:
        """Offset of the oldest unfinished record, or the next offset; None before the first record."""
        state = self._assigned.get(partition)
        return state.position if state else None

    def next_offset(self, partition: Partition) -> int | None:
        """The lowest offset that `receive` accepts; None before the first record."""
        state = self._assigned.get(partition)
        return state.frontier if state else None

    def finished_above(self, partition: Partition) -> list[int]:
        """Finished offsets above the committable prefix, ascending."""
        state = self._assigned[partition]
        if state.position is None or state.frontier is None:
            return []
        return [offset for offset in range(state.position, state.frontier) if offset not in state.unfinished]


def _union(one: FinishedOffsets | None, other: FinishedOffsets | None) -> FinishedOffsets | None:
    return one.union(other) if one and other else one or other


def _partition(pair: Partition) -> Partition:
    """Convert the Kafka library's TopicPartition."""
    return Partition(*pair)
