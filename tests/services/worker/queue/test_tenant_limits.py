"""Which jobs a tenant's limits let run or wait in memory: bounds that hold for any arrivals."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import Lane, OverLimit, WaitReason
from services.tenants.limits import TenantLimits
from services.worker.jobs import BASE_GROUP
from services.worker.queue.backlog import Backlog, Demand, Waiting
from services.worker.queue.tenant_limits import Admission, LimitedTenants

STANDARD, BATCH, INTERACTIVE = Lane.STANDARD, Lane.BATCH, Lane.INTERACTIVE
WINDOW, MAX_WAITING, HOLD_S = 8, 12, 5.0


def demand(tenant: str = "acme", tokens: float = 10.0, lane: Lane = STANDARD) -> Demand:
    return Demand(lane, tenant, BASE_GROUP, tokens)


@dataclass
class Worker:
    """A backlog with limits, an engine without a size limit, and a database of parked jobs."""

    now: float = 0.0
    running: list[Waiting[int]] = field(default_factory=list)
    parked: dict[tuple[str, Lane], deque[tuple[int, Demand]]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    arrived: int = 0

    def __post_init__(self) -> None:
        self.backlog = Backlog[int](10_000, weight_of=lambda tenant: self.tenants.weight_of(tenant))
        self.tenants = LimitedTenants(self.backlog, WINDOW, MAX_WAITING, HOLD_S)

    def follow(self, **limits: TenantLimits) -> "Worker":
        self.tenants.follow(limits)
        return self

    def arrive(self, each: Demand) -> Admission:
        self.arrived += 1
        return self._admit(self.arrived, each, was_parked=False)

    def _admit(self, job: int, each: Demand, *, was_parked: bool) -> Admission:
        admission = self.tenants.admit(each, self.now, was_parked=was_parked)
        match admission:
            case Admission.QUEUE:
                self.backlog.add(job, each, self.now)
            case Admission.PARK:
                self.parked.setdefault((each.tenant, each.lane), deque()).append((job, each))
            case Admission.REFUSE:
                self.refused.append(job)
        return admission

    def start(self, limit: int = 1000) -> list[Waiting[int]]:
        popped = self.backlog.pop(
            limit,
            now=self.now,
            allows=self.tenants.allows(self.now),
            started=lambda each: self.tenants.started(each, self.now),
        )
        self.running += popped
        return popped

    def end(self, index: int, share: float = 1.0) -> None:
        if self.running:
            waiting = self.running.pop(index % len(self.running))
            self.tenants.ended(waiting.demand, share * waiting.demand.tokens, self.now)
            self.done.append(waiting.job)

    def unpark(self) -> None:
        pairs = [pair for pair, jobs in self.parked.items() if jobs]
        for tenant, lane, count in self.tenants.places(pairs, self.now):
            for _ in range(min(count, len(self.parked[tenant, lane]))):
                self._admit(*self.parked[tenant, lane].popleft(), was_parked=True)

    def check(self) -> None:
        """As the runner does it every second."""
        for reason, waiting in list(self.backlog.reasons(self.tenants.allows(self.now))):
            if reason is not WaitReason.TENANT_LIMIT:
                continue
            tenant = waiting[0].demand.tenant
            overdue = {each.job: each.demand for each in self.tenants.overdue(tenant, list(waiting), self.now)}
            refuses = self.tenants.limits_of(tenant).over_limit is OverLimit.REFUSE
            for job in self.backlog.remove(lambda job, overdue=overdue: job in overdue):
                if refuses:
                    self.refused.append(job)
                else:
                    pair = (tenant, overdue[job].lane)
                    self.parked.setdefault(pair, deque()).append((job, overdue[job]))


def numbers(waiting: list[Waiting[int]]) -> list[int]:
    return [each.job for each in waiting]


LIMITS = st.builds(
    TenantLimits,
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    running=st.none() | st.integers(0, 3),
    queued=st.none() | st.integers(1, 4),
    tokens_per_s=st.none() | st.sampled_from([1.0, 7.0, 50.0]),
    over_limit=st.sampled_from(OverLimit),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"), st.sampled_from("xyz"), st.sampled_from(Lane), st.integers(1, 60), st.integers(1, 6)
        ),
        st.tuples(st.just("start"), st.integers(1, 5)),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0])),
        st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 6.0])),
        st.tuples(st.just("unpark")),
        st.tuples(st.just("check")),
    ),
    max_size=80,
)


def take(worker: Worker, action: str, arguments: list[Any]) -> list[Waiting[int]]:
    match action, arguments:
        case "arrive", [tenant, lane, tokens, count]:
            for _ in range(count):
                worker.arrive(demand(tenant, tokens, lane))
        case "start", [limit]:
            return worker.start(limit)
        case "end", [index, share]:
            worker.end(index, share)
        case "pass", [seconds]:
            worker.now += seconds
        case "unpark", []:
            worker.unpark()
        case "check", []:
            worker.check()
    return []


@given(st.dictionaries(st.sampled_from("xy"), LIMITS), STEPS)
def test_limits_hold_and_no_job_is_lost(limits: dict[str, TenantLimits], steps: list[tuple[Any, ...]]) -> None:
    worker = Worker().follow(**limits)
    spent: dict[str, list[tuple[float, float]]] = {tenant: [] for tenant in "xyz"}
    for action, *arguments in steps:
        for started in take(worker, action, arguments):
            spent[started.demand.tenant].append((worker.now, started.demand.tokens))
        running = Counter(each.demand.tenant for each in worker.running)
        for tenant, each in limits.items():
            assert each.running is None or running[tenant] <= each.running
            assert each.queued is None or worker.backlog.num_waiting(tenant) <= each.queued
        for lane in Lane:
            crowd = {name: count for name, count in worker.backlog.waiting_by_tenant(lane) if name in limits}
            if all(each.over_limit is OverLimit.WAIT for each in limits.values()):
                held = [count for name, count in crowd.items() if worker.tenants.is_limited(name)]
                assert sum(held) <= MAX_WAITING + len(held)
        assert not [pair for pair in worker.parked if pair[0] == "z"], "a tenant without limits was parked"
        parked = sum(map(len, worker.parked.values()))
        gone = parked + len(worker.refused) + len(worker.done)
        assert gone + len(worker.backlog) + len(worker.running) == worker.arrived


@given(
    st.sampled_from([1.0, 10.0, 100.0]),
    st.sampled_from([5.0, 50.0]),
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0.0, 0.1, 1.0, 9.0])), max_size=60),
)
def test_tokens_over_any_interval_stay_below_rate_and_burst_but_for_one_job(
    rate: float, burst: float, arrivals: list[tuple[int, float]]
) -> None:
    worker = Worker().follow(acme=TenantLimits(tokens_per_s=rate, burst=burst))
    spent: list[tuple[float, float]] = []
    for tokens, pause_s in arrivals:
        worker.arrive(demand(tokens=tokens))
        worker.now += pause_s
        worker.unpark()
        spent += [(worker.now, each.demand.tokens) for each in worker.start()]
        while worker.running:
            worker.end(0)
    for first, (began, _) in enumerate(spent):
        used = 0.0
        for at, tokens in spent[first:]:
            assert used < burst + rate * (at - began) + 1e-6, "a job started although the bucket was empty"
            used += tokens


def test_a_tenant_at_its_limit_holds_up_no_other() -> None:
    worker = Worker().follow(acme=TenantLimits(running=1))
    for _ in range(500):
        worker.arrive(demand("acme"))
    worker.arrive(demand("globex"))
    assert sorted(numbers(worker.start())) == [1, 501]
    assert Counter(each.demand.tenant for each in worker.running) == {"acme": 1, "globex": 1}
    assert len(worker.backlog) <= 2, "jobs that cannot run soon stay in memory"


def test_parked_jobs_run_in_their_order_before_later_ones() -> None:
    worker = Worker().follow(acme=TenantLimits(running=1))
    for _ in range(20):
        worker.arrive(demand())
    order = []
    while len(order) < 25:
        if worker.arrived < 25:
            worker.arrive(demand())
        worker.unpark()
        order += numbers(worker.start())
        worker.end(0)
    assert order == list(range(1, 26))


def test_an_interactive_job_does_not_wait_behind_parked_ones_of_another_lane() -> None:
    worker = Worker().follow(acme=TenantLimits(running=1))
    for _ in range(20):
        worker.arrive(demand(lane=BATCH))
    worker.start()
    assert worker.arrive(demand(lane=INTERACTIVE)) is Admission.QUEUE
    worker.end(0)
    worker.unpark()
    assert numbers(worker.start()) == [21]


def test_a_job_larger_than_the_burst_runs_and_is_paid_back() -> None:
    worker = Worker().follow(acme=TenantLimits(tokens_per_s=10.0, burst=20.0))
    worker.arrive(demand(tokens=100.0))
    worker.arrive(demand(tokens=1.0))
    assert numbers(worker.start()) == [1]
    worker.now = 7.9
    assert worker.start() == []
    worker.now = 8.1
    assert numbers(worker.start()) == [2]


def test_unused_tokens_are_refunded() -> None:
    worker = Worker().follow(acme=TenantLimits(tokens_per_s=1.0, burst=100.0))
    worker.arrive(demand(tokens=100.0))
    worker.arrive(demand(tokens=50.0))
    worker.start()
    worker.end(0, share=0.4)
    assert numbers(worker.start()) == [2]


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"queued": 2}, "at its limit of 2 queued jobs"),
        ({"running": 0}, "at its limit of 0 running jobs"),
        ({"running": 1}, "at its limit of 1 running jobs"),
        ({"tokens_per_s": 2.5}, "at its limit of 2.5 tokens per second"),
    ],
)
def test_a_refusal_names_the_limit_and_its_value(limits: dict[str, Any], sentence: str) -> None:
    worker = Worker().follow(acme=TenantLimits(over_limit=OverLimit.REFUSE, **limits))
    admissions = [worker.arrive(demand()) for _ in range(WINDOW + 3)]
    assert admissions[-1] is Admission.REFUSE
    assert sentence in worker.tenants.refusal("acme")


def test_a_job_that_its_limit_holds_for_long_leaves_memory() -> None:
    for over_limit in OverLimit:
        worker = Worker().follow(acme=TenantLimits(running=1, over_limit=over_limit))
        worker.arrive(demand())
        worker.arrive(demand())
        worker.start()
        worker.now = HOLD_S
        worker.check()
        assert len(worker.backlog) == 1
        worker.now = HOLD_S + 1
        worker.check()
        assert len(worker.backlog) == 0
        assert (worker.refused == [2]) is (over_limit is OverLimit.REFUSE)


def test_parked_jobs_stay_in_the_database_while_none_can_start() -> None:
    worker = Worker().follow(acme=TenantLimits(running=1))
    for _ in range(9):
        worker.arrive(demand())
    worker.start()
    worker.now = HOLD_S + 1
    worker.check()
    worker.unpark()
    assert len(worker.backlog) == 0
    worker.end(0)
    worker.unpark()
    assert 0 < len(worker.backlog) <= 2


def test_without_limits_again_parked_jobs_return() -> None:
    worker = Worker().follow(acme=TenantLimits(running=0))
    for _ in range(WINDOW):
        assert worker.arrive(demand()) is Admission.PARK
    worker.follow()
    worker.unpark()
    assert len(worker.start()) == WINDOW


def test_weights_are_followed() -> None:
    worker = Worker().follow(acme=TenantLimits(weight=3.0))
    assert [worker.tenants.weight_of(name) for name in ("acme", "globex")] == [3.0, 1.0]
    assert not worker.tenants.is_limited("acme")
