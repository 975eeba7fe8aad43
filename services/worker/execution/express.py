"""Which waiting job may take the place of a running one. Pure policy.

When the engine is full, a tenant that comes with its first jobs would wait for another's long ones to end. So a pair of
lane and tenant that has less than its fair part of the places may displace jobs of one that has more:

    fair part of pair p = places * weight of p / weights of all pairs that run or ask

where a pair's weight is its lane's times its tenant's. A displaced job goes on as soon as a place is free, from the
prefix cache as far as its pages are still there, and is displaced at most once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from schemas.common import Lane
from services.worker.jobs import NO_TRIAL, Job, JobKey
from services.worker.queue.backlog import WEIGHTS, Demand

EXPRESS_SHARE = 4
"""One place in so many may be taken by displacing at a time."""


class Pair(NamedTuple):
    """Those who share the engine's places."""

    lane: Lane
    tenant: str


class Express:
    """The running jobs of one moment, oldest first; `displaced` are the keys of those that gave way once."""

    def __init__(
        self,
        places: int,
        running: Sequence[Job],
        displaced: Collection[JobKey],
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
    ) -> None:
        self._places = places
        self._running = running
        self._displaced = displaced
        self._weight_of = weight_of
        self._held = Counter(map(_pair, running))
        self._weight = sum(map(self._weight_for, self._held))

    @property
    def room(self) -> int:
        """How many more jobs may displace another now."""
        return max(1, self._places // EXPRESS_SHARE) - len(self._displaced)

    def allows(self, demand: Demand) -> bool:
        """Whether a job's pair has less than its fair part, and some job may give way to it."""
        pair = Pair(demand.lane, demand.tenant)
        return self._held[pair] + 1 <= self._fair(pair, pair) and self.victim(demand) is not None

    def victim(self, demand: Demand) -> Job | None:
        """The youngest job of the pair that is furthest above its fair part."""
        asking = Pair(demand.lane, demand.tenant)
        excess = {pair: held - self._fair(pair, asking) for pair, held in self._held.items() if pair != asking}
        for pair in sorted((pair for pair in excess if excess[pair] >= 1), key=excess.__getitem__, reverse=True):
            for job in reversed(self._running):
                if _pair(job) == pair and job.key not in self._displaced and job.trial == NO_TRIAL:
                    return job
        return None

    def _fair(self, pair: Pair, asking: Pair) -> float:
        total = self._weight + (0.0 if asking in self._held else self._weight_for(asking))
        return self._places * self._weight_for(pair) / total

    def _weight_for(self, pair: Pair) -> float:
        return WEIGHTS[pair.lane] * self._weight_of(pair.tenant)


def _pair(job: Job) -> Pair:
    return Pair(job.lane, job.key.tenant)
