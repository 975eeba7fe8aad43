"""Which waiting job may take the place of a running one. Pure policy.

In a full engine, the first jobs of a tenant would wait until long jobs of other tenants end. So a pair of lane and
tenant with less than its fair share of the engine's places may displace a job of a pair with more:

    fair share of pair p = places * weight of p / total weight of the asking pair and of all running ones

A pair's weight is the lane's weight times the tenant's. A displaced job continues when a place is free, with those of
its pages that are still in the prefix cache. A job is displaced at most once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from schemas.common import Lane
from services.worker.jobs import NO_TRIAL, Job, JobKey
from services.worker.queue.backlog import WEIGHTS, Demand

EXPRESS_SHARE = 4
"""At most 1 / EXPRESS_SHARE of the places may be taken by displacing at any time."""


class Pair(NamedTuple):
    """A lane and a tenant, which together have a share of the engine's places."""

    lane: Lane
    tenant: str


class Express:
    """Decides for one moment. `running` is ordered oldest first; `displaced` are the keys of jobs displaced before."""

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
        """How many more jobs may displace a running one now."""
        return max(1, self._places // EXPRESS_SHARE) - len(self._displaced)

    def allows(self, demand: Demand) -> bool:
        """Whether the job's pair has less than its fair share and there is a job that it may displace."""
        pair = Pair(demand.lane, demand.tenant)
        return self._held[pair] + 1 <= self._fair(pair, pair) and self.victim(demand) is not None

    def victim(self, demand: Demand) -> Job | None:
        """The job to displace: the youngest one of the pair furthest above its fair share; None if there is none."""
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
