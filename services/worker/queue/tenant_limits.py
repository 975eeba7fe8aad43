"""Decides whether a tenant's limits let a job start or wait in memory. Pure policy: `now` is monotonic seconds.

    running       jobs running < running limit
    tokens/s      level > 0 of a token bucket, which fills at the rate up to the burst; a job is charged its expected
                  tokens at its start, corrected when it ends
    queued        jobs waiting in memory < queued limit

A job may start while the level is above 0, and may take it below 0. So in T seconds a tenant uses at most
burst + rate * T tokens plus those of the job that started last, and a job larger than the burst can run.

Only the next jobs of a tenant with a running or token limit wait in memory, at most its window. So a tenant at its
limit takes no memory from others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from schemas.common import Lane, OverLimit
from services.tenants.limits import NO_LIMITS, TenantLimits
from services.worker.queue.backlog import Allows, Demand, Waiting, always

MIN_WINDOW = 2
NEXT_PER_RUNNING = 2
"""Jobs that may wait in memory per job that may run, so that a next job is ready when one ends."""
SIZE_MEMORY = 0.9
"""Weight of the previous average in a tenant's moving average of tokens per job."""


JobT = TypeVar("JobT")


class Counts(Protocol):
    """The part of the backlog that this module reads."""

    def num_waiting(self, tenant: str, lane: Lane | None = None) -> int:
        """Number of the tenant's jobs, of one lane or of all."""

    def waiting_by_tenant(self, lane: Lane) -> Iterable[tuple[str, int]]:
        """The tenants with jobs in a lane, and how many each has."""


class Admission(Enum):
    """The decision about an arriving job: queue it in memory, park it or refuse it."""

    QUEUE = "queue"
    PARK = "park"
    REFUSE = "refuse"


@dataclass(slots=True)
class _Usage:
    """A tenant's usage in this worker. `level` is that of its token bucket at time `at`; None means full."""

    running: int = 0
    level: float | None = None
    at: float = 0.0
    started_at: float | None = None
    mean_tokens: float | None = None


class LimitedTenants:
    """The tenants' limits and their usage in this worker. `waiting` counts the jobs that wait in memory.

    Per lane, at most `max_window` jobs of one limited tenant and `max_waiting` jobs of all limited tenants wait in
    memory. A job leaves memory after it has waited `hold_s` seconds for its tenant's limit.
    """

    def __init__(self, waiting: Counts, max_window: int, max_waiting: int, hold_s: float) -> None:
        self._waiting = waiting
        self._max_window = max(MIN_WINDOW, max_window)
        self._max_waiting = max(MIN_WINDOW, max_waiting)
        self._hold_s = hold_s
        self._limits: Mapping[str, TenantLimits] = {}
        self._usage: dict[str, _Usage] = {}
        self._parked: set[tuple[str, Lane]] = set()

    def __bool__(self) -> bool:
        return bool(self._limits)

    def follow(self, limits: Mapping[str, TenantLimits]) -> None:
        """Apply new limits from now on."""
        for tenant, usage in self._usage.items():
            if limits.get(tenant, NO_LIMITS).tokens_per_s is None:
                usage.level = None
        self._limits = limits
        idle = [tenant for tenant, usage in self._usage.items() if not usage.running and tenant not in limits]
        for tenant in idle:
            del self._usage[tenant]

    def limits_of(self, tenant: str) -> TenantLimits:
        """The tenant's limits."""
        return self._limits.get(tenant, NO_LIMITS)

    def weight_of(self, tenant: str) -> float:
        """The tenant's share of a lane relative to other tenants."""
        return self.limits_of(tenant).weight

    def is_limited(self, tenant: str) -> bool:
        """Whether a limit may keep the tenant's jobs from starting."""
        limits = self.limits_of(tenant)
        return limits.running is not None or limits.tokens_per_s is not None

    def starts_at_once(self, tenant: str) -> bool:
        """Whether the tenant's jobs can start without checking a limit."""
        return not self.is_limited(tenant) and self.limits_of(tenant).queued is None

    def allows(self, now: float) -> Allows:
        """A predicate for the backlog: whether a job may start now. Call `started` for each job that starts."""
        if not self._limits:
            return always
        return lambda demand: self._may_start(demand.tenant, now)

    def _may_start(self, tenant: str, now: float) -> bool:
        limits, usage = self.limits_of(tenant), self._usage.get(tenant)
        if limits.running is not None and (usage.running if usage else 0) >= limits.running:
            return False
        return limits.tokens_per_s is None or usage is None or self._level(limits, usage, now) > 0

    def _level(self, limits: TenantLimits, usage: _Usage, now: float) -> float:
        assert limits.tokens_per_s is not None
        if usage.level is None:
            return limits.burst_tokens
        return min(limits.burst_tokens, usage.level + max(0.0, now - usage.at) * limits.tokens_per_s)

    def started(self, demand: Demand, now: float) -> None:
        """Note that a job starts, and charge its expected tokens."""
        usage = self._usage.setdefault(demand.tenant, _Usage())
        usage.running += 1
        usage.started_at = now
        mean = usage.mean_tokens
        usage.mean_tokens = demand.tokens if mean is None else SIZE_MEMORY * mean + (1 - SIZE_MEMORY) * demand.tokens
        self._charge(demand.tenant, usage, demand.tokens, now)

    def ended(self, demand: Demand, tokens: float, now: float) -> None:
        """Note that a started job left the engine, and correct its charge to `tokens`; 0 if it did not run."""
        usage = self._usage[demand.tenant]
        usage.running -= 1
        self._charge(demand.tenant, usage, tokens - demand.tokens, now)
        if demand.tenant not in self._limits and not usage.running:
            del self._usage[demand.tenant]

    def _charge(self, tenant: str, usage: _Usage, tokens: float, now: float) -> None:
        limits = self.limits_of(tenant)
        if limits.tokens_per_s is not None:
            usage.level = self._level(limits, usage, now) - tokens
            usage.at = now

    def admit(self, demand: Demand, now: float, *, was_parked: bool = False) -> Admission:
        """Decide whether an arriving job is queued in memory, parked or refused."""
        tenant, lane = demand.tenant, demand.lane
        if tenant not in self._limits:
            return Admission.QUEUE
        if not self._has_room(tenant, lane, now):
            if self.limits_of(tenant).over_limit is OverLimit.REFUSE and not was_parked:
                return Admission.REFUSE
            return self._park(tenant, lane)
        if (tenant, lane) in self._parked and not was_parked:
            return Admission.PARK
        is_first = not self._waiting.num_waiting(tenant, lane)
        if self.is_limited(tenant) and not is_first and self._num_waiting(lane) >= self._max_waiting:
            return self._park(tenant, lane)
        return Admission.QUEUE

    def _park(self, tenant: str, lane: Lane) -> Admission:
        self._parked.add((tenant, lane))
        return Admission.PARK

    def _has_room(self, tenant: str, lane: Lane, now: float) -> bool:
        queued, window = self.limits_of(tenant).queued, self.window(tenant, now)
        if queued is not None and self._waiting.num_waiting(tenant) >= queued:
            return False
        return window is None or self._waiting.num_waiting(tenant, lane) < window

    def _num_waiting(self, lane: Lane) -> int:
        """Number of waiting jobs of all limited tenants."""
        return sum(count for tenant, count in self._waiting.waiting_by_tenant(lane) if self.is_limited(tenant))

    def window(self, tenant: str, now: float) -> int | None:
        """The largest number of the tenant's jobs that may wait in memory per lane; None means no bound."""
        limits = self.limits_of(tenant)
        if not self.is_limited(tenant):
            return None
        if limits.running == 0:
            return 0
        if limits.over_limit is OverLimit.REFUSE:
            return None if limits.queued is not None else self._max_window
        bounds = [self._max_window]
        if limits.running is not None:
            bounds.append(max(MIN_WINDOW, NEXT_PER_RUNNING * limits.running))
        if limits.tokens_per_s is not None:
            bounds.append(self._affordable(tenant, limits, now))
        return min(bounds)

    def _affordable(self, tenant: str, limits: TenantLimits, now: float) -> int:
        """Number of average jobs that the tenant's tokens of the next `hold_s` seconds cover; at least one."""
        assert limits.tokens_per_s is not None
        usage = self._usage.get(tenant)
        if usage is None or usage.mean_tokens is None:
            return self._max_window
        tokens = max(0.0, self._level(limits, usage, now)) + self._hold_s * limits.tokens_per_s
        return max(1, int(tokens / max(1.0, usage.mean_tokens)))

    def claimable(self, tenant: str, lane: Lane, now: float) -> int:
        """How many jobs parked for a limit may return to memory now."""
        if self._is_stalled(tenant, now):
            return 0
        window, waiting = self.window(tenant, now), self._waiting.num_waiting(tenant, lane)
        bounds = [self._max_window if window is None else window - waiting]
        if (queued := self.limits_of(tenant).queued) is not None:
            bounds.append(queued - self._waiting.num_waiting(tenant))
        if self.is_limited(tenant):
            bounds.append(max(self._max_waiting - self._num_waiting(lane), 1 - waiting))
        return max(0, min(bounds))

    def places(self, parked: Sequence[tuple[str, Lane]], now: float) -> list[tuple[str, Lane, int]]:
        """How many jobs parked for a limit may return to memory now, by tenant and lane, in the order of lanes.

        `parked` holds every tenant and lane with such jobs; they go before jobs that arrive.
        """
        self._parked = set(parked)
        lanes = list(Lane)
        in_order = sorted(parked, key=lambda pair: lanes.index(pair[1]))
        return [(tenant, lane, count) for tenant, lane in in_order if (count := self.claimable(tenant, lane, now))]

    def wants_parked(self, tenant: str, now: float) -> bool:
        """Whether too few jobs of the tenant wait in memory, so that parked ones should be claimed now."""
        lanes = [lane for lane in Lane if (tenant, lane) in self._parked]
        return any(self.claimable(tenant, lane, now) > self._waiting.num_waiting(tenant, lane) for lane in lanes)

    def _is_stalled(self, tenant: str, now: float) -> bool:
        """Whether the tenant is at its limit, and none of its jobs has started for `hold_s`."""
        if self._may_start(tenant, now):
            return False
        usage = self._usage.get(tenant)
        return usage is None or usage.started_at is None or now - usage.started_at > self._hold_s

    def overdue(self, tenant: str, waiting: Sequence[Waiting[JobT]], now: float) -> list[Waiting[JobT]]:
        """The jobs among `waiting`, those of one tenant and lane that wait for its limit, that must leave memory now.

        While the tenant's jobs start, the next ones stay in memory, unless its limit refuses jobs instead.
        """
        late = [each for each in waiting if now - each.since > self._hold_s]
        if self.limits_of(tenant).over_limit is OverLimit.REFUSE or self._is_stalled(tenant, now):
            return late
        oldest = sorted(waiting, key=lambda each: each.order)[: self.window(tenant, now)]
        stays = {each.order for each in oldest}
        return [each for each in late if each.order not in stays]

    def refusal(self, tenant: str) -> str:
        """The error message of a refused job: the limit, its value and the remedy."""
        limits = self.limits_of(tenant)
        if limits.queued is not None and self._waiting.num_waiting(tenant) >= limits.queued:
            limit, option = f"{limits.queued} queued jobs", "--queued"
        elif limits.running is not None:
            limit, option = f"{limits.running} running jobs", "--running"
        else:
            limit, option = f"{limits.tokens_per_s:g} tokens per second", "--tokens-per-s"
        return (
            f"tenant {tenant!r} is at its limit of {limit}; send the job again later,"
            f" or raise the limit with `loraq tenants limits {tenant} {option}`"
        )
