"""The ledger of offsets: which position of each partition may be committed. Pure policy, no clock, no I/O.

Jobs finish in any order; a position may only be committed when every record below it is finished.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Partition(NamedTuple):
    """A partition of a topic; equal to the Kafka library's own pair."""

    topic: str
    number: int


class Place(NamedTuple):
    """Where a record stands."""

    partition: Partition
    offset: int


@dataclass(slots=True)
class _Column:
    """One assigned partition: records handed out and not yet below the prefix, oldest first."""

    open: deque[int] = field(default_factory=deque)
    finished: set[int] = field(default_factory=set)
    position: int | None = None
    committed: int | None = None

    def advance(self) -> None:
        while self.open and self.open[0] in self.finished:
            offset = self.open.popleft()
            self.finished.remove(offset)
            self.position = offset + 1


class Ledger:
    """Contiguous finished prefix of every assigned partition."""

    def __init__(self) -> None:
        self._columns: dict[Partition, _Column] = {}

    def assign(self, partitions: Iterable[Partition]) -> None:
        """Start afresh for these partitions: their records will be delivered again from the committed position."""
        for partition in partitions:
            self._columns[Partition(*partition)] = _Column()

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Forget these partitions; what finishes later of them is of no consequence here."""
        for partition in partitions:
            self._columns.pop(Partition(*partition), None)

    @property
    def partitions(self) -> frozenset[Partition]:
        """The partitions that are assigned."""
        return frozenset(self._columns)

    def receive(self, place: Place) -> bool:
        """Note a record that was handed out; False when its partition is not assigned or it was noted before."""
        column = self._columns.get(place.partition)
        if column is None or not _is_next(column, place.offset):
            return False
        column.open.append(place.offset)
        return True

    def finish(self, place: Place) -> bool:
        """Note that nothing more will happen for this record; False when the ledger no longer holds it."""
        column = self._columns.get(place.partition)
        if column is None or not _is_open(column, place.offset):
            return False
        column.finished.add(place.offset)
        column.advance()
        return True

    def holds(self, place: Place) -> bool:
        """Whether the record was handed out under the present assignment and is not finished."""
        column = self._columns.get(place.partition)
        return column is not None and _is_open(column, place.offset)

    def due(self) -> dict[Partition, int]:
        """Positions that moved since they were last committed."""
        return {
            partition: column.position
            for partition, column in self._columns.items()
            if column.position is not None and column.position != column.committed
        }

    def committed(self, positions: dict[Partition, int]) -> None:
        """Note what the broker acknowledged; positions of partitions lost meanwhile are ignored."""
        for partition, position in positions.items():
            column = self._columns.get(partition)
            if column is not None:
                column.committed = max(position, column.committed or 0)

    def num_open(self, topic: str) -> int:
        """Records of a topic that were handed out and are not finished."""
        return sum(
            len(column.open) - len(column.finished)
            for partition, column in self._columns.items()
            if partition.topic == topic
        )

    def position(self, partition: Partition) -> int | None:
        """Offset of the oldest unfinished record, or the next one; None while nothing was handed out."""
        column = self._columns.get(partition)
        if column is None:
            return None
        return column.open[0] if column.open else column.position

    def next_offset(self, partition: Partition) -> int | None:
        """The lowest offset that `receive` takes; None while nothing was handed out."""
        column = self._columns.get(partition)
        if column is None:
            return None
        return column.open[-1] + 1 if column.open else column.position

    def finished_above(self, partition: Partition) -> list[int]:
        """Finished offsets above the committable prefix, ascending: what a restart would run again without need."""
        return sorted(self._columns[partition].finished)


def _is_next(column: _Column, offset: int) -> bool:
    newest = column.open[-1] if column.open else (column.position or 0) - 1
    return offset > newest


def _is_open(column: _Column, offset: int) -> bool:
    if not column.open or offset in column.finished:
        return False
    return column.open[0] <= offset <= column.open[-1]
