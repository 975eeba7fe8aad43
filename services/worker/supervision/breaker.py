"""When to stop taking jobs because most of them end badly for no fault of their senders. Pure policy.

If a wrong release, a lost key or a broken engine makes every job fail, a worker that goes on turns a topic full of
good jobs into failed rows and dead letters within minutes. But one tenant that sends garbage must stop nobody. A
tenant's say is therefore bounded: within the window each counts for at most `min_jobs / min_tenants` jobs, whatever it
sends, and the breaker opens when at least `min_jobs` of such bounded evidence is there and `ratio` of it is bad. One
tenant alone never has enough, and beside neighbours that are served well it takes more than `ratio` of all. What cannot
be traced to a registered tenant has no say.

After a while the breaker probes: a few jobs are taken, and their fate decides. Each time it opens again it waits
longer.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

SLOTS = 12
PROBE_SHARE = 4
MAX_DOUBLINGS = 5


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Bounds of a breaker; times in seconds. With `min_jobs` 0 it never opens."""

    window_s: float
    min_jobs: int
    min_tenants: int
    ratio: float
    probe_after_s: float

    @property
    def probe_jobs(self) -> int:
        """Evidence that decides a probe, and jobs that a lane takes at once during one."""
        return max(self.min_tenants, self.min_jobs // PROBE_SHARE)


class BreakerState(StrEnum):
    """Closed lets everything through, open nothing, probing a little."""

    CLOSED = "closed"
    PROBING = "probing"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the window says: jobs as counted with every tenant's say bounded, and the tenants with bad ones."""

    jobs: float
    bad: float
    tenants: int

    def condemns(self, min_jobs: int, ratio: float) -> bool:
        """Whether that is enough, and bad enough."""
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
    """Told how each job ended and asked now and then; `now` is seconds on any steady clock.

    `evidence` is what it opened for when it last did.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._slots: deque[_Slot] = deque()
        self._since: float | None = None
        self._doublings = 0
        self.state = BreakerState.CLOSED
        self.evidence = Evidence(0.0, 0.0, 0)

    def note(self, tenant: str, now: float, *, bad: bool) -> None:
        """A job of a registered tenant ended, badly or not."""
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
        """What is known of the window, if `min_jobs` are to decide."""
        totals: dict[str, _Tally] = {}
        for slot in self._slots:
            for tenant, tally in slot.tallies.items():
                total = totals.setdefault(tenant, _Tally())
                total.good += tally.good
                total.bad += tally.bad
        pairs = [tally.bounded(min_jobs / self._limits.min_tenants) for tally in totals.values()]
        afflicted = sum(tally.bad > 0 for tally in totals.values())
        return Evidence(sum(weight for weight, _ in pairs), sum(bad for _, bad in pairs), afflicted)

    def _condemned(self, min_jobs: int) -> bool:
        """Whether the window says so; most often a look at the sum is enough, whatever the number of tenants."""
        ratio = self._limits.ratio
        if sum(slot.num_bad for slot in self._slots) < ratio * min_jobs:
            return False
        self.evidence = self._evidence(min_jobs)
        return self.evidence.condemns(min_jobs, ratio)

    def tick(self, now: float) -> BreakerState:
        """Look at the evidence and at the time; returns the state from now on."""
        while self._slots and now - self._slots[0].since > self._limits.window_s:
            self._slots.popleft()
        match self.state:
            case BreakerState.CLOSED:
                self._tick_closed(now)
            case BreakerState.OPEN:
                if now >= self.opens_until:
                    self._enter(BreakerState.PROBING, now)
            case BreakerState.PROBING:
                self._tick_probing(now)
        return self.state

    @property
    def opens_until(self) -> float:
        """When an open breaker probes."""
        assert self._since is not None
        return self._since + self._limits.probe_after_s * 2.0**self._doublings

    def _tick_closed(self, now: float) -> None:
        limits = self._limits
        if self._since is not None and now - self._since > limits.window_s:
            self._doublings = 0
        if limits.min_jobs and self._condemned(limits.min_jobs):
            self._enter(BreakerState.OPEN, now)

    def _tick_probing(self, now: float) -> None:
        """Closed as soon as enough is known that does not condemn, be it of one tenant."""
        if self._condemned(self._limits.probe_jobs):
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            self._enter(BreakerState.OPEN, now)
        elif sum(slot.num_jobs for slot in self._slots) >= self._limits.probe_jobs:
            self._enter(BreakerState.CLOSED, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        """The new state starts without a past, except that an opening is remembered for its delay."""
        self.state, self._since = state, now
        self._slots.clear()
