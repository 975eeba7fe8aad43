"""When to stop consuming because most jobs fail for a reason that is not their producers' fault. Pure policy.

If a bad release, a lost key or a broken engine makes every job fail, a worker that continues turns a topic of good jobs
into failed rows and dead letters within minutes. But one tenant that sends garbage must not stop the others. So the
weight of each tenant is bounded: within the window it counts for at most `min_jobs / min_tenants` jobs. The breaker
opens when the weighted jobs reach `min_jobs` and `ratio` of them are bad. A single tenant never reaches `min_jobs`, and
next to tenants whose jobs succeed it takes bad jobs from more than `ratio` of all. Records that cannot be traced to a
registered tenant do not count.

After a delay the breaker probes: a few jobs run, and their outcomes decide. The delay doubles each time it reopens.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

SLOTS = 12
PROBE_SHARE = 4
MAX_DOUBLINGS = 5


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Limits of a breaker; times in seconds. With `min_jobs` 0 it never opens."""

    window_s: float
    min_jobs: int
    min_tenants: int
    ratio: float
    probe_after_s: float

    @property
    def probe_jobs(self) -> int:
        """Jobs that decide a probe, and the bound of a lane during one."""
        return max(self.min_tenants, self.min_jobs // PROBE_SHARE)


class BreakerState(StrEnum):
    """A closed breaker passes all jobs, an open one none, a probing one a few."""

    CLOSED = "closed"
    PROBING = "probing"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Totals of the window, with the weight of each tenant bounded, and the number of tenants with bad jobs."""

    jobs: float
    bad: float
    tenants: int

    def suffices(self, min_jobs: int, ratio: float) -> bool:
        """Whether there are enough jobs and enough of them are bad."""
        return self.jobs >= min_jobs and self.bad >= ratio * self.jobs


@dataclass(slots=True)
class _Tally:
    good: int = 0
    bad: int = 0

    def bounded(self, most: float) -> tuple[float, float]:
        total = self.good + self.bad
        weight = min(total, most)
        return weight, weight * self.bad / total


@dataclass(slots=True)
class _Slot:
    since: float
    num_jobs: int = 0
    num_bad: int = 0
    tallies: dict[str, _Tally] = field(default_factory=dict)


class Breaker:
    """Records how jobs end and decides the state; `now` is seconds on any monotonic clock.

    `evidence` is the evidence for which it last opened.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._slots: deque[_Slot] = deque()
        self._since: float | None = None
        self._doublings = 0
        self.state = BreakerState.CLOSED
        self.evidence = Evidence(0.0, 0.0, 0)

    def record(self, tenant: str, now: float, *, bad: bool) -> None:
        """Record the end of a job of a registered tenant."""
        if not self._slots or now - self._slots[-1].since >= self._limits.window_s / SLOTS:
            self._slots.append(_Slot(now))
        slot = self._slots[-1]
        tally = slot.tallies.setdefault(tenant, _Tally())
        slot.num_jobs += 1
        if bad:
            slot.num_bad += 1
            tally.bad += 1
        else:
            tally.good += 1

    def _evidence(self, min_jobs: int) -> Evidence:
        """Evidence of the window, with weights for a decision on `min_jobs`."""
        totals: dict[str, _Tally] = {}
        for slot in self._slots:
            for tenant, tally in slot.tallies.items():
                total = totals.setdefault(tenant, _Tally())
                total.good += tally.good
                total.bad += tally.bad
        pairs = [tally.bounded(min_jobs / self._limits.min_tenants) for tally in totals.values()]
        affected = sum(tally.bad > 0 for tally in totals.values())
        return Evidence(sum(weight for weight, _ in pairs), sum(bad for _, bad in pairs), affected)

    def _suffices(self, min_jobs: int) -> bool:
        """Whether the window's evidence suffices; the cheap test on the totals avoids iterating over tenants."""
        ratio = self._limits.ratio
        if sum(slot.num_bad for slot in self._slots) < ratio * min_jobs:
            return False
        self.evidence = self._evidence(min_jobs)
        return self.evidence.suffices(min_jobs, ratio)

    def tick(self, now: float) -> BreakerState:
        """Update and return the state."""
        while self._slots and now - self._slots[0].since > self._limits.window_s:
            self._slots.popleft()
        match self.state:
            case BreakerState.CLOSED:
                self._tick_closed(now)
            case BreakerState.OPEN:
                if now >= self.open_until:
                    self._enter(BreakerState.PROBING, now)
            case BreakerState.PROBING:
                self._tick_probing(now)
        return self.state

    @property
    def open_until(self) -> float:
        """The time at which an open breaker starts to probe."""
        assert self._since is not None
        return self._since + self._limits.probe_after_s * 2.0**self._doublings

    def _tick_closed(self, now: float) -> None:
        limits = self._limits
        if self._since is not None and now - self._since > limits.window_s:
            self._doublings = 0
        if limits.min_jobs and self._suffices(limits.min_jobs):
            self._enter(BreakerState.OPEN, now)

    def _tick_probing(self, now: float) -> None:
        """Close after enough jobs without sufficient evidence, even if all are of one tenant."""
        if self._suffices(self._limits.probe_jobs):
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            self._enter(BreakerState.OPEN, now)
        elif sum(slot.num_jobs for slot in self._slots) >= self._limits.probe_jobs:
            self._enter(BreakerState.CLOSED, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        """Enter a state with an empty window; only the number of doublings is kept."""
        self.state, self._since = state, now
        self._slots.clear()
