"""The backlog: jobs that wait for the engine, grouped by adapter, and the order in which they run. Pure policy.

Lanes share the engine by weight, so none starves: each job charges its lane the inverse of the lane's weight, and the
lane with the lowest charge goes next. Within a lane the oldest job of an open group goes next. A group is open while
its adapter is loaded; jobs of closed groups wait without blocking others.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from schemas.common import Lane
from services.worker.jobs import BASE_GROUP

WEIGHTS = {Lane.INTERACTIVE: 16.0, Lane.STANDARD: 4.0, Lane.BATCH: 1.0}

JobT = TypeVar("JobT")


class Waiting(NamedTuple, Generic[JobT]):
    """A job in the backlog; the lowest `order` is the oldest, `since` is when it was queued."""

    order: int
    since: float
    job: JobT


@dataclass(slots=True)
class _LaneQueue(Generic[JobT]):
    weight: float
    groups: dict[str, deque[Waiting[JobT]]] = field(default_factory=dict)
    heads: list[tuple[int, str]] = field(default_factory=list)
    charge: float = 0.0

    def push_head(self, group: str) -> None:
        heapq.heappush(self.heads, (self.groups[group][0].order, group))

    def oldest_open(self, is_open: Callable[[str], bool]) -> str | None:
        while self.heads:
            order, group = self.heads[0]
            queue = self.groups.get(group)
            if queue and queue[0].order == order and is_open(group):
                return group
            heapq.heappop(self.heads)
        return None


class Backlog(Generic[JobT]):
    """Bounded queue of jobs. `group` is an adapter's digest or `BASE_GROUP`, which is always open."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lanes = {lane: _LaneQueue[JobT](weight) for lane, weight in WEIGHTS.items()}
        self._open = {BASE_GROUP}
        self._next_order = 0
        self._first_order = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, job: JobT, lane: Lane, group: str, now: float) -> None:
        """Append a job to its lane and group; `now` is seconds on any monotonic clock."""
        assert self._size < self.capacity, "the backlog is full: partitions should have been paused"
        self._append(job, lane, group, now, order=self._next_order)
        self._next_order += 1

    def requeue(self, job: JobT, lane: Lane, group: str, now: float) -> None:
        """Queue a job again, ahead of all others of its lane: it has already waited once."""
        self._first_order -= 1
        queue = self._lanes[lane]
        self._align_charge(queue)
        queue.groups.setdefault(group, deque()).appendleft(Waiting(self._first_order, now, job))
        self._size += 1
        if group in self._open:
            queue.push_head(group)

    def _append(self, job: JobT, lane: Lane, group: str, now: float, order: int) -> None:
        queue = self._lanes[lane]
        self._align_charge(queue)
        waiting = queue.groups.setdefault(group, deque())
        waiting.append(Waiting(order, now, job))
        self._size += 1
        if len(waiting) == 1 and group in self._open:
            queue.push_head(group)

    def _align_charge(self, queue: _LaneQueue[JobT]) -> None:
        """Start a lane that was empty at the charge of the others: it cannot save up an unused share."""
        if not queue.groups:
            charges = [other.charge for other in self._lanes.values() if other.groups]
            queue.charge = max(queue.charge, min(charges, default=queue.charge))

    def open(self, group: str) -> None:
        """Mark a group's adapter as loaded: its jobs may start."""
        self._open.add(group)
        for queue in self._lanes.values():
            if group in queue.groups:
                queue.push_head(group)

    def is_open(self, group: str) -> bool:
        """Whether the group's jobs may start."""
        return group in self._open

    def close(self, group: str) -> None:
        """Mark a group's adapter as unloaded or draining: its jobs wait."""
        assert group != BASE_GROUP, "the base model is always loaded"
        self._open.discard(group)

    def pop(self, limit: int) -> list[JobT]:
        """Remove and return up to `limit` jobs of open groups, in the order in which they run."""
        popped: list[JobT] = []
        while len(popped) < limit and (choice := self._next_choice()) is not None:
            queue, group = choice
            popped.append(self._pop(queue, group))
            queue.charge += 1.0 / queue.weight
        return popped

    def _next_choice(self) -> tuple[_LaneQueue[JobT], str] | None:
        best: tuple[_LaneQueue[JobT], str] | None = None
        for queue in self._lanes.values():
            group = queue.oldest_open(self._open.__contains__)
            if group is not None and (best is None or queue.charge < best[0].charge):
                best = (queue, group)
        return best

    def _pop(self, queue: _LaneQueue[JobT], group: str) -> JobT:
        waiting = queue.groups[group].popleft()
        self._size -= 1
        if queue.groups[group]:
            queue.push_head(group)
        else:
            del queue.groups[group]
        return waiting.job

    def remove(self, matches: Callable[[JobT], bool]) -> list[JobT]:
        """Remove and return every job that matches."""
        removed: list[JobT] = []
        for queue in self._lanes.values():
            for group in list(queue.groups):
                removed += self._remove_from(queue, group, matches)
        self._size -= len(removed)
        return removed

    def _remove_from(self, queue: _LaneQueue[JobT], group: str, matches: Callable[[JobT], bool]) -> list[JobT]:
        kept: deque[Waiting[JobT]] = deque()
        removed: list[JobT] = []
        for waiting in queue.groups[group]:
            if matches(waiting.job):
                removed.append(waiting.job)
            else:
                kept.append(waiting)
        if not removed:
            return removed
        if kept:
            queue.groups[group] = kept
            if group in self._open:
                queue.push_head(group)
        else:
            del queue.groups[group]
        return removed

    def closed_groups(self, now: float) -> list[tuple[str, float]]:
        """Groups whose adapter must be loaded, each with the time its oldest job was queued; most urgent first.

        Urgency is the wait of a lane's oldest job times the lane's weight: every wait grows, so no group starves.
        """
        urgency: dict[str, float] = {}
        since: dict[str, float] = {}
        for queue in self._lanes.values():
            for group, waiting in queue.groups.items():
                if group not in self._open:
                    oldest = waiting[0].since
                    urgency[group] = max(urgency.get(group, 0.0), (now - oldest) * queue.weight)
                    since[group] = min(since.get(group, oldest), oldest)
        return [(group, since[group]) for group in sorted(urgency, key=lambda group: -urgency[group])]

    def groups(self) -> set[str]:
        """Groups with waiting jobs."""
        return {group for queue in self._lanes.values() for group in queue.groups}

    def waiting_in(self, group: str) -> Iterator[Waiting[JobT]]:
        """Jobs of one group, lane by lane, oldest first."""
        for queue in self._lanes.values():
            yield from queue.groups.get(group, ())
