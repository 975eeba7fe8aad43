"""A worker's adapters: which are checked and known to its engine, so that their jobs may start. Pure policy.

It decides with the worker's own Residency. An adapter that is not known is fetched to disk, unless it is there, and
checked (read and hashed) before its group opens.
"""

import heapq
from dataclasses import dataclass
from typing import Any

from services.simulate.engines.tiers import Tiers
from services.worker.adapters.loads import MAX_LOADS, MIN_STAY_S, URGENT_AFTER_S
from services.worker.adapters.residency import Residency
from services.worker.queue.backlog import Backlog


@dataclass(frozen=True, slots=True)
class StagingModel:
    """`budget_bytes` is LORAQ_HOST_CACHE_BYTES, `check_bytes_per_s` how fast an adapter's file is read and hashed."""

    budget_bytes: float
    check_bytes_per_s: float = 1e9


class Staging:
    """Opens and closes the groups of a backlog in simulated time."""

    def __init__(self, model: StagingModel, tiers: Tiers, backlog: Backlog[Any], num_bytes: dict[str, float]) -> None:
        self._model, self._tiers, self._backlog, self._num_bytes = model, tiers, backlog, num_bytes
        self._residency = Residency(round(model.budget_bytes), MIN_STAY_S)
        self._loading: list[tuple[float, str]] = []
        self._cold_since: dict[str, float] = {}
        self._draining: set[str] = set()
        self.closed: list[str] = []
        """Groups that closed since the list was last cleared."""

    @property
    def next_at(self) -> float:
        """When the next adapter is ready."""
        return self._loading[0][0] if self._loading else float("inf")

    def plan(self, now: float) -> None:
        """Open groups that are ready; begin to stage those whose jobs wait."""
        while self._loading and self._loading[0][0] <= now:
            group = heapq.heappop(self._loading)[1]
            self._residency.loaded(group, round(self._num_bytes[group]))
            self._cold_since.pop(group, None)
            self._backlog.open(group)
        if len(self._loading) >= MAX_LOADS:
            return
        cold = [group for group, _ in self._backlog.closed_groups(now) if not self._residency.is_loaded(group)]
        self._cold_since = {group: self._cold_since.get(group, now) for group in cold}
        drain: set[str] = set()
        for group in cold:
            if group not in self._residency and len(self._loading) < MAX_LOADS:
                drain |= self._begin(group, now)
        self._drain(drain)

    def _begin(self, group: str, now: float) -> set[str]:
        needed = self._backlog.wanted()
        needed += sorted(self._backlog.groups().difference(needed))
        urgent = now - self._cold_since[group] > URGENT_AFTER_S
        num_bytes = self._num_bytes[group]
        reservation = self._residency.reserve(group, round(num_bytes), needed, urgent=urgent, now=now)
        for victim in reservation.evict:
            self._close(victim)
            self._draining.discard(victim)
        if reservation.granted:
            arrives = self._tiers.fetch(group, num_bytes, now)
            heapq.heappush(self._loading, (arrives + num_bytes / self._model.check_bytes_per_s, group))
        return set(reservation.drain)

    def _close(self, group: str) -> None:
        self._backlog.close(group)
        self.closed.append(group)

    def _drain(self, drain: set[str]) -> None:
        for group in drain - self._draining:
            self._close(group)
        for group in self._draining - drain:
            if self._residency.is_loaded(group):
                self._backlog.open(group)
        self._draining = drain

    def acquire(self, group: str) -> None:
        """A job of the group goes to the engine."""
        if group:
            self._residency.acquire(group)

    def release(self, group: str) -> None:
        """A job of the group left the engine."""
        if group:
            self._residency.release(group)
