"""The backlog: the jobs that wait for the engine, and which one starts next. Pure policy; see docs/scheduling.md.

    lane     the least served one, in tokens divided by weight, among those with a job that could start
    tenant   any with credit (`shares.py`)
    job      close to its deadline > adapter in the running batch > adapter in the engine's pages > oldest,
             never past the bound on overtaking (`overtaking.py`)

A group is the jobs of one adapter. It is open while its adapter is loaded; jobs of a closed group do not delay others.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from schemas.common import Lane, WaitReason
from services.worker.jobs import BASE_GROUP
from services.worker.queue.overtaking import Overtaking
from services.worker.queue.shares import Shares

WEIGHTS = {Lane.INTERACTIVE: 16.0, Lane.STANDARD: 4.0, Lane.BATCH: 1.0}
PREFIX_SCAN = 8
"""How many jobs of a group, oldest first, are searched for one whose prefix is in the batch."""

DEADLINE_SCAN = 8
"""How many urgent jobs, earliest deadline first, are searched for one that may start."""

JobT = TypeVar("JobT")


@dataclass(frozen=True, slots=True)
class Demand:
    """What the policy knows about a job.

    `tokens` is the known or estimated number of prompt and output tokens. `cost` is the expected cost of the job in
    decoded tokens; None means `tokens`. `num_bytes` is the memory that its request uses in the worker. `deadline` is on
    the clock of `now`. Jobs with the same `prefix` begin with the same text.
    """

    lane: Lane
    tenant: str
    group: str
    tokens: float = 1.0
    cost: float | None = None
    num_bytes: int = 0
    deadline: float | None = None
    prefix: int | None = None

    @property
    def charge(self) -> float:
        """The tokens that the lane and the tenant are charged for the job."""
        return self.tokens if self.cost is None else self.cost


class Waiting(NamedTuple, Generic[JobT]):
    """A job in the backlog; the smallest `order` is the oldest, `since` is when it was queued."""

    order: int
    since: float
    job: JobT
    demand: Demand


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the engine holds: jobs by group, groups whose adapter is in its pages, prefixes of its jobs."""

    running: Mapping[str, int] = field(default_factory=dict)
    resident: AbstractSet[str] = frozenset()
    prefixes: AbstractSet[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LaneRules:
    """How one lane is ordered; `overtake_tokens` 0 means first come, first served.

    A job is overtaken by at most `overtake_tokens` of later arrivals of its lane and tenant. `quantum_tokens` is the
    credit of a tenant per round. A job is urgent within `urgent_s` of its deadline.
    """

    overtake_tokens: float = 0.0
    quantum_tokens: float = 256.0
    urgent_s: float = 2.0


Allows = Callable[[Demand], bool]


def always(_demand: Demand) -> bool:
    """Allow every job."""
    return True


class _Queue(Generic[JobT]):
    """The waiting jobs of one tenant in one lane."""

    def __init__(self) -> None:
        self.groups: dict[str, deque[Waiting[JobT]]] = {}
        self.size = 0
        self.overtaking = Overtaking()
        self._heads: list[tuple[int, str]] = []

    def push(self, group: str) -> None:
        heapq.heappush(self._heads, (self.groups[group][0].order, group))

    def oldest(self, is_open: Collection[str]) -> Waiting[JobT] | None:
        """The oldest job of an open group."""
        while self._heads:
            order, group = self._heads[0]
            waiting = self.groups.get(group)
            if waiting and waiting[0].order == order and group in is_open:
                return waiting[0]
            heapq.heappop(self._heads)
        return None


class _LaneQueue(Generic[JobT]):
    """The waiting jobs of one lane; `charge` is the tokens served so far, divided by the lane's weight."""

    def __init__(self, weight: float, rules: LaneRules, weight_of: Callable[[str], float]) -> None:
        self.weight = weight
        self.rules = rules
        self.shares = Shares(rules.quantum_tokens, weight_of)
        self.queues: dict[str, _Queue[JobT]] = {}
        self.tenants_of: dict[str, dict[str, None]] = {}
        self.deadlines: list[tuple[float, int, str, str]] = []
        self.charge = 0.0
        self._heads: list[tuple[int, str]] = []
        self._spent: dict[str, None] = {}

    def follow(self, rules: LaneRules) -> None:
        self.rules = rules
        self.shares.quantum = rules.quantum_tokens

    def touch(self, tenant: str, is_open: Collection[str]) -> None:
        """The tenant's oldest open job may be another one now."""
        queue = self.queues.get(tenant)
        if queue is not None and (oldest := queue.oldest(is_open)) is not None:
            heapq.heappush(self._heads, (oldest.order, tenant))

    def choose(self, view: EngineView, is_open: Collection[str], allows: Allows, now: float) -> Waiting[JobT] | None:
        """The job of this lane that goes next; begins a round of credits where that is due."""
        while True:
            choice = (
                self._urgent(is_open, allows, now)
                or self._of_groups(view.running, view, is_open, allows)
                or self._of_groups(view.resident, view, is_open, allows)
                or self._oldest(is_open, allows)
            )
            if choice is not None or not self._next_round(is_open, allows):
                return choice

    def _urgent(self, is_open: Collection[str], allows: Allows, now: float) -> Waiting[JobT] | None:
        """The job within reach of its deadline that has the earliest one and may go."""
        later: list[tuple[float, int, str, str]] = []
        found: Waiting[JobT] | None = None
        while self.deadlines and found is None and len(later) < DEADLINE_SCAN:
            deadline, order, tenant, group = self.deadlines[0]
            if deadline - now > self.rules.urgent_s:
                break
            entry = heapq.heappop(self.deadlines)
            group_jobs = self.queues[tenant].groups.get(group, ()) if tenant in self.queues else ()
            waiting = next((each for each in group_jobs if each.order == order), None)
            if waiting is None:
                continue  # it is gone
            later.append(entry)
            if group in is_open and self._may(tenant, waiting, is_open, allows):
                found = waiting
        for entry in later:
            heapq.heappush(self.deadlines, entry)
        return found

    def _of_groups(
        self, groups: Iterable[str], view: EngineView, is_open: Collection[str], allows: Allows
    ) -> Waiting[JobT] | None:
        """The oldest job of these groups that may go."""
        best: Waiting[JobT] | None = None
        for group in groups:
            if group not in is_open:
                continue
            for tenant in self.tenants_of.get(group, ()):
                waiting = self._first(self.queues[tenant].groups[group], view)
                is_older = best is None or waiting.order < best.order
                if is_older and self._may(tenant, waiting, is_open, allows):
                    best = waiting
        return best

    def _first(self, waiting: deque[Waiting[JobT]], view: EngineView) -> Waiting[JobT]:
        if view.prefixes:
            for index in range(min(len(waiting), PREFIX_SCAN)):
                if waiting[index].demand.prefix in view.prefixes:
                    return waiting[index]
        return waiting[0]

    def _may(self, tenant: str, waiting: Waiting[JobT], is_open: Collection[str], allows: Allows) -> bool:
        queue = self.queues[tenant]
        oldest = queue.oldest(is_open)
        return (
            oldest is not None
            and self.shares.credit(tenant) > 0
            and queue.overtaking.allows(oldest.order, waiting.order, waiting.demand.tokens, self.rules.overtake_tokens)
            and allows(waiting.demand)
        )

    def _oldest(self, is_open: Collection[str], allows: Allows) -> Waiting[JobT] | None:
        """The oldest job of the lane whose tenant has credit."""
        limited: list[tuple[int, str]] = []
        found: Waiting[JobT] | None = None
        while self._heads and found is None:
            order, tenant = self._heads[0]
            oldest = self.queues[tenant].oldest(is_open) if tenant in self.queues else None
            if oldest is None or oldest.order != order:
                heapq.heappop(self._heads)
            elif self.shares.credit(tenant) <= 0:
                self._spent[tenant] = None
                heapq.heappop(self._heads)
            elif not allows(oldest.demand):
                limited.append(heapq.heappop(self._heads))
            else:
                found = oldest
        for head in limited:
            heapq.heappush(self._heads, head)
        return found

    def _next_round(self, is_open: Collection[str], allows: Allows) -> bool:
        """Begin a new round if jobs wait only for their tenants' credit; returns whether it began one."""
        servable = [tenant for tenant in self._spent if self._is_servable(tenant, is_open, allows)]
        if not servable:
            return False
        self.shares.next_round(servable)
        spent, self._spent = self._spent, {}
        for tenant in spent:
            self.touch(tenant, is_open)
        return True

    def _is_servable(self, tenant: str, is_open: Collection[str], allows: Allows) -> bool:
        oldest = self.queues[tenant].oldest(is_open) if tenant in self.queues else None
        return oldest is not None and allows(oldest.demand)

    def waiting(self) -> Iterator[Waiting[JobT]]:
        for queue in self.queues.values():
            for group in queue.groups.values():
                yield from group


class Backlog(Generic[JobT]):
    """Bounded queue of jobs. `group` is an adapter's digest, `BASE_GROUP` for the base model, which is always open.

    `rules` holds the rules of each lane; `weight_of` returns a tenant's weight within its lane.
    """

    def __init__(
        self,
        capacity: int,
        rules: Mapping[Lane, LaneRules] | None = None,
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
    ) -> None:
        self.capacity = capacity
        self.weight_of = weight_of
        rules = rules or {}
        self._lanes = {
            lane: _LaneQueue[JobT](weight, rules.get(lane, LaneRules()), weight_of) for lane, weight in WEIGHTS.items()
        }
        self._open = {BASE_GROUP}
        self._next_order = 0
        self._first_order = 0
        self._size = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiting[JobT]]:
        for lane in self._lanes.values():
            yield from lane.waiting()

    def num_waiting(self, tenant: str, lane: Lane | None = None) -> int:
        """Number of the tenant's jobs, of one lane or of all."""
        lanes = self._lanes.values() if lane is None else (self._lanes[lane],)
        return sum(queue.size for each in lanes if (queue := each.queues.get(tenant)) is not None)

    def waiting_by_tenant(self, lane: Lane) -> Iterator[tuple[str, int]]:
        """The tenants with jobs in a lane, and how many each has."""
        for tenant, queue in self._lanes[lane].queues.items():
            yield tenant, queue.size

    def follow(self, rules: Mapping[Lane, LaneRules]) -> None:
        """Apply new rules from now on."""
        for lane, each in rules.items():
            self._lanes[lane].follow(each)
            self._lanes[lane].shares.forget_full()

    def add(self, job: JobT, demand: Demand, now: float) -> None:
        """Queue a job behind those of its lane, tenant and group; `now` in seconds on any steady clock."""
        assert self._size < self.capacity, "the backlog is full: partitions should have been paused"
        self._queue_of(demand).setdefault(demand.group, deque()).append(Waiting(self._next_order, now, job, demand))
        self._next_order += 1
        self._added(demand, self._next_order - 1)

    def requeue(self, job: JobT, demand: Demand, now: float) -> None:
        """Queue a job again at the front of its group, because it has waited before."""
        self._first_order -= 1
        self._queue_of(demand).setdefault(demand.group, deque()).appendleft(
            Waiting(self._first_order, now, job, demand)
        )
        self._added(demand, self._first_order)

    def _queue_of(self, demand: Demand) -> dict[str, deque[Waiting[JobT]]]:
        lane = self._lanes[demand.lane]
        if not lane.queues:
            charges = [other.charge for other in self._lanes.values() if other.queues]
            lane.charge = max(lane.charge, min(charges, default=lane.charge))
        return lane.queues.setdefault(demand.tenant, _Queue()).groups

    def _added(self, demand: Demand, order: int) -> None:
        lane = self._lanes[demand.lane]
        lane.tenants_of.setdefault(demand.group, {})[demand.tenant] = None
        if demand.deadline is not None:
            heapq.heappush(lane.deadlines, (demand.deadline, order, demand.tenant, demand.group))
        lane.queues[demand.tenant].size += 1
        self._size += 1
        self.num_bytes += demand.num_bytes
        self._show(lane, demand.tenant, demand.group)

    def _show(self, lane: _LaneQueue[JobT], tenant: str, group: str) -> None:
        """Index a tenant's group again after its first job has changed or the group was opened."""
        if group in self._open:
            lane.queues[tenant].push(group)
            lane.touch(tenant, self._open)

    def open(self, group: str) -> None:
        """Let the group's jobs start: its adapter is loaded."""
        self._open.add(group)
        for lane in self._lanes.values():
            for tenant in lane.tenants_of.get(group, ()):
                self._show(lane, tenant, group)

    def is_open(self, group: str) -> bool:
        """Whether the group's jobs may start."""
        return group in self._open

    def close(self, group: str) -> None:
        """Make the group's jobs wait: its adapter is or will be unloaded."""
        assert group != BASE_GROUP, "the base model is always loaded"
        self._open.discard(group)
        for lane in self._lanes.values():
            for tenant in lane.tenants_of.get(group, ()):
                lane.touch(tenant, self._open)

    def pop(
        self,
        limit: int,
        view: EngineView | None = None,
        now: float = 0.0,
        allows: Allows = always,
        started: Callable[[Demand], None] | None = None,
    ) -> list[Waiting[JobT]]:
        """Remove and return up to `limit` jobs of open groups, in the order in which they should run.

        Each is charged its expected cost, which `correct` later replaces with the actual cost. `allows` is called for
        each job after `started` was called with the previous one.
        """
        view = view or EngineView()
        running = dict(view.running)
        view = EngineView(running, view.resident, view.prefixes)
        taken: list[Waiting[JobT]] = []
        while len(taken) < limit and (waiting := self._choose(view, allows, now)) is not None:
            self._admit(waiting)
            if started is not None:
                started(waiting.demand)
            running[waiting.demand.group] = running.get(waiting.demand.group, 0) + 1
            taken.append(waiting)
        return taken

    def _choose(self, view: EngineView, allows: Allows, now: float) -> Waiting[JobT] | None:
        for lane in sorted(self._lanes.values(), key=lambda lane: lane.charge):
            if lane.queues and (choice := lane.choose(view, self._open, allows, now)) is not None:
                return choice
        return None

    def _admit(self, waiting: Waiting[JobT]) -> None:
        demand = waiting.demand
        lane = self._lanes[demand.lane]
        lane.charge += demand.charge / lane.weight
        lane.shares.charge(demand.tenant, demand.charge)
        lane.queues[demand.tenant].overtaking.admit(waiting.order, demand.tokens)
        self._remove(lane, waiting)

    def correct(self, waiting: Waiting[JobT], tokens: float, cost: float | None = None) -> None:
        """Correct the charges of a removed job to its actual tokens and cost; 0 if it did not run."""
        demand = waiting.demand
        lane = self._lanes[demand.lane]
        unused = (tokens if cost is None else cost) - demand.charge
        lane.charge += unused / lane.weight
        lane.shares.charge(demand.tenant, unused)
        if (queue := lane.queues.get(demand.tenant)) is not None:
            queue.overtaking.correct(waiting.order, tokens)

    def _remove(self, lane: _LaneQueue[JobT], waiting: Waiting[JobT]) -> None:
        demand = waiting.demand
        queue = lane.queues[demand.tenant].groups[demand.group]
        if queue[0] is waiting:
            queue.popleft()
        else:
            queue.remove(waiting)
        lane.queues[demand.tenant].size -= 1
        self._size -= 1
        self.num_bytes -= demand.num_bytes
        self._shrunk(lane, demand.tenant, demand.group)

    def _shrunk(self, lane: _LaneQueue[JobT], tenant: str, group: str) -> None:
        queue = lane.queues[tenant]
        if queue.groups[group]:
            if group in self._open:
                queue.push(group)
        else:
            del queue.groups[group]
            del lane.tenants_of[group][tenant]
            if not lane.tenants_of[group]:
                del lane.tenants_of[group]
        if queue.groups:
            lane.touch(tenant, self._open)
        else:
            del lane.queues[tenant]

    def remove(self, matches: Callable[[JobT], bool]) -> list[JobT]:
        """Remove and return every job that matches: lost partitions, failed adapters, cancellations."""
        removed = [waiting for waiting in self if matches(waiting.job)]
        for waiting in removed:
            self._remove(self._lanes[waiting.demand.lane], waiting)
        return [waiting.job for waiting in removed]

    def closed_groups(self, now: float) -> list[tuple[str, float]]:
        """Groups whose adapter must be loaded, with the time since which their oldest job waits; most urgent first.

        Urgency is the wait of a lane's oldest job times the lane's weight: every wait grows, so no group starves.
        """
        urgency: dict[str, float] = {}
        since: dict[str, float] = {}
        for lane in self._lanes.values():
            for group, tenants in lane.tenants_of.items():
                if group not in self._open:
                    oldest = min(lane.queues[tenant].groups[group][0].since for tenant in tenants)
                    urgency[group] = max(urgency.get(group, 0.0), (now - oldest) * lane.weight)
                    since[group] = min(since.get(group, oldest), oldest)
        return [(group, since[group]) for group in sorted(urgency, key=lambda group: -urgency[group])]

    def wanted(self) -> list[str]:
        """Open groups with waiting jobs, the one with the oldest job first: its adapter is needed soonest."""
        oldest: dict[str, int] = {}
        for lane in self._lanes.values():
            for group, tenants in lane.tenants_of.items():
                if group in self._open:
                    order = min(lane.queues[tenant].groups[group][0].order for tenant in tenants)
                    oldest[group] = min(oldest.get(group, order), order)
        return sorted(oldest, key=oldest.__getitem__)

    def groups(self) -> set[str]:
        """Groups that have waiting jobs."""
        return {group for lane in self._lanes.values() for group in lane.tenants_of}

    def waiting_in(self, group: str) -> Iterator[Waiting[JobT]]:
        """Jobs of one group, lane by lane, oldest first for each tenant."""
        for lane in self._lanes.values():
            for tenant in lane.tenants_of.get(group, ()):
                yield from lane.queues[tenant].groups[group]

    def reasons(self, allows: Allows = always) -> Iterator[tuple[WaitReason, Sequence[Waiting[JobT]]]]:
        """The reason why jobs wait, with the jobs: one pair for each group of a tenant."""
        for lane in self._lanes.values():
            for tenant, queue in lane.queues.items():
                oldest = queue.oldest(self._open)
                for group, waiting in queue.groups.items():
                    yield self._reason(lane, tenant, group, waiting[0], oldest, allows), waiting

    def _reason(
        self,
        lane: _LaneQueue[JobT],
        tenant: str,
        group: str,
        first: Waiting[JobT],
        oldest: Waiting[JobT] | None,
        allows: Allows,
    ) -> WaitReason:
        if group not in self._open or oldest is None:
            return WaitReason.ADAPTER_LOADING
        if not allows(first.demand):
            return WaitReason.TENANT_LIMIT
        if lane.shares.credit(tenant) <= 0:
            return WaitReason.TENANT_OVER_SHARE
        if lane.queues[tenant].overtaking.passed(oldest.order) > 0:
            return WaitReason.OVERTAKEN_FOR_AFFINITY
        return WaitReason.ENGINE_FULL
