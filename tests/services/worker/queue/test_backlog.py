"""Which job starts next: lanes and tenants by tokens, affinity within the bound on overtaking, and no job starves."""

from collections import Counter, defaultdict
from typing import Any, NamedTuple, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from schemas.common import Lane, WaitReason
from services.worker.jobs import BASE_GROUP
from services.worker.queue.backlog import Backlog, Demand, EngineView, LaneRules

INTERACTIVE, STANDARD, BATCH = Lane.INTERACTIVE, Lane.STANDARD, Lane.BATCH
JobT = TypeVar("JobT")


def add(backlog: Backlog[JobT], job: JobT, lane: Lane, group: str, now: float, **more: Any) -> None:
    backlog.add(job, Demand(lane, more.pop("tenant", "acme"), group, **more), now)


def requeue(backlog: Backlog[JobT], job: JobT, lane: Lane, group: str, now: float) -> None:
    backlog.requeue(job, Demand(lane, "acme", group), now)


def pop(backlog: Backlog[JobT], limit: int, view: EngineView | None = None, now: float = 0.0) -> list[JobT]:
    return [waiting.job for waiting in backlog.pop(limit, view, now)]


def test_jobs_of_one_lane_run_oldest_first_across_adapters() -> None:
    backlog = Backlog[str](10)
    backlog.open("a")
    backlog.open("b")
    for number, group in enumerate(["b", "a", "b", BASE_GROUP]):
        add(backlog, f"job {number}", STANDARD, group, now=float(number))
    assert pop(backlog, 10) == ["job 0", "job 1", "job 2", "job 3"]
    assert len(backlog) == 0


def test_a_cold_adapter_does_not_block_other_jobs() -> None:
    backlog = Backlog[str](10)
    add(backlog, "cold", INTERACTIVE, "a", now=0.0)
    add(backlog, "warm", BATCH, BASE_GROUP, now=1.0)
    assert pop(backlog, 2) == ["warm"]
    assert backlog.closed_groups(now=2.0) == [("a", 0.0)]
    backlog.open("a")
    assert pop(backlog, 2) == ["cold"]


def test_a_closed_group_waits_again() -> None:
    backlog = Backlog[str](10)
    backlog.open("a")
    add(backlog, "job", STANDARD, "a", now=0.0)
    backlog.close("a")
    assert pop(backlog, 1) == []
    backlog.open("a")
    assert pop(backlog, 1) == ["job"]


def test_lanes_share_by_weight_and_none_starves() -> None:
    backlog = Backlog[Lane](1000)
    for lane in (BATCH, STANDARD, INTERACTIVE):
        for _ in range(300):
            add(backlog, lane, lane, BASE_GROUP, now=0.0)
    popped = pop(backlog, 210)
    assert popped[0] == INTERACTIVE
    assert Counter(popped) == {INTERACTIVE: 160, STANDARD: 40, BATCH: 10}


def test_a_lane_cannot_save_up_its_share() -> None:
    backlog = Backlog[Lane](1000)
    for _ in range(200):
        add(backlog, BATCH, BATCH, BASE_GROUP, now=0.0)
    pop(backlog, 100)
    for _ in range(200):
        add(backlog, INTERACTIVE, INTERACTIVE, BASE_GROUP, now=1.0)
    assert BATCH in pop(backlog, 40), "the lane that started later got every slot"


def test_requeued_jobs_go_first() -> None:
    backlog = Backlog[str](10)
    for name in ("first", "second", "third"):
        add(backlog, name, STANDARD, BASE_GROUP, now=0.0)
    popped = pop(backlog, 2)
    for job in reversed(popped):
        requeue(backlog, job, STANDARD, BASE_GROUP, now=1.0)
    assert pop(backlog, 3) == ["first", "second", "third"]


def test_the_next_adapter_to_load_has_the_longest_weighted_wait() -> None:
    backlog = Backlog[str](10)
    add(backlog, "old batch job", BATCH, "a", now=0.0)
    add(backlog, "young interactive job", INTERACTIVE, "b", now=9.0)
    assert [group for group, _ in backlog.closed_groups(now=10.0)] == ["b", "a"]
    backlog.remove(lambda job: job.startswith("young"))
    add(backlog, "younger interactive job", INTERACTIVE, "b", now=9.9)
    assert [group for group, _ in backlog.closed_groups(now=10.0)] == ["a", "b"]


def test_removing_keeps_the_order_of_the_rest() -> None:
    backlog = Backlog[int](10)
    for number in range(6):
        add(backlog, number, STANDARD, BASE_GROUP, now=0.0)
    assert backlog.remove(lambda job: job % 2 == 0) == [0, 2, 4]
    assert pop(backlog, 6) == [1, 3, 5]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(list(Lane)), st.sampled_from(["", "a", "b", "c"])),
        st.tuples(st.just("pop"), st.integers(1, 4)),
        st.tuples(st.just("open"), st.sampled_from(["a", "b", "c"])),
        st.tuples(st.just("close"), st.sampled_from(["a", "b", "c"])),
        st.tuples(st.just("remove"), st.sampled_from(["", "a", "b", "c"])),
        st.tuples(st.just("requeue")),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_no_job_is_lost_or_popped_twice_or_popped_while_closed(actions: list[tuple[object, ...]]) -> None:
    backlog = Backlog[tuple[int, Lane, str]](1000)
    waiting: set[tuple[int, Lane, str]] = set()
    is_open = {""}
    last: list[tuple[int, Lane, str]] = []
    for number, (action, *arguments) in enumerate(actions):
        match action, arguments:
            case "add", [lane, group]:
                job = (number, lane, group)
                add(backlog, job, lane, group, now=float(number))
                waiting.add(job)
            case "pop", [limit]:
                last = pop(backlog, limit)
                assert all(job[2] in is_open for job in last)
                assert len(last) == min(limit, sum(job[2] in is_open for job in waiting))
                waiting -= set(last)
            case "open", [group]:
                backlog.open(group)
                is_open.add(group)
            case "close", [group]:
                backlog.close(group)
                is_open.discard(group)
            case "remove", [group]:
                removed = backlog.remove(lambda job, group=group: job[2] == group)
                assert set(removed) == {job for job in waiting if job[2] == group}
                waiting -= set(removed)
            case "requeue", []:
                for job in reversed(last):
                    requeue(backlog, job, job[1], job[2], now=float(number))
                waiting |= set(last)
                last = []
        assert len(backlog) == len(waiting)
        assert {group for group, _ in backlog.closed_groups(float(number))} == {job[2] for job in waiting} - is_open


def affine(overtake_tokens: float, quantum: float = 1e9, urgent_s: float = 2.0) -> dict[Lane, LaneRules]:
    return dict.fromkeys(Lane, LaneRules(overtake_tokens, quantum, urgent_s))


def opened(backlog: Backlog[JobT], *groups: str) -> Backlog[JobT]:
    for group in groups:
        backlog.open(group)
    return backlog


def test_jobs_of_the_batch_s_adapters_go_first_then_those_in_the_pages() -> None:
    backlog = opened(Backlog[str](10, affine(100)), "cold", "resident", "running")
    for group in ("cold", "resident", "running"):
        add(backlog, group, STANDARD, group, 0.0)
    assert pop(backlog, 3, EngineView({"running": 1}, {"resident", "running"})) == ["running", "resident", "cold"]


def test_a_job_is_overtaken_by_the_bound_and_no_further() -> None:
    backlog = opened(Backlog[int](100, affine(3)), "cold", "hot")
    add(backlog, 0, STANDARD, "cold", 0.0)
    for number in range(1, 6):
        add(backlog, number, STANDARD, "hot", 0.0)
    assert pop(backlog, 10, EngineView({"hot": 1}, {"hot"})) == [1, 2, 3, 0, 4, 5]


def test_unused_tokens_are_returned_to_the_bound() -> None:
    backlog = opened(Backlog[int](100, affine(4)), "cold", "hot")
    view = EngineView({"hot": 1}, {"hot"})
    add(backlog, 0, STANDARD, "cold", 0.0)
    for number in range(1, 4):
        add(backlog, number, STANDARD, "hot", 0.0, tokens=4)
    (first,) = backlog.pop(1, view)
    backlog.correct(first, 1)
    assert pop(backlog, 1, view) == [0], "three tokens are left, the next job may need four"


def test_a_bound_of_zero_is_first_come_first_served() -> None:
    backlog = opened(Backlog[int](100, affine(0)), "cold", "hot")
    add(backlog, 0, STANDARD, "cold", 0.0)
    add(backlog, 1, STANDARD, "hot", 0.0)
    assert pop(backlog, 2, EngineView({"hot": 1}, {"hot"})) == [0, 1]


def test_a_near_deadline_goes_first_and_a_far_one_does_not() -> None:
    backlog = Backlog[str](10, affine(100, urgent_s=2.0))
    add(backlog, "early", STANDARD, BASE_GROUP, 0.0)
    add(backlog, "far", STANDARD, BASE_GROUP, 0.0, tenant="globex", deadline=100.0)
    add(backlog, "near", STANDARD, BASE_GROUP, 0.0, tenant="initech", deadline=11.0)
    assert pop(backlog, 3, now=10.0) == ["near", "early", "far"]


def test_an_urgent_job_passes_jobs_of_its_adapter_and_one_that_cannot_start_blocks_no_other() -> None:
    backlog = Backlog[str](10, affine(100, urgent_s=2.0))
    add(backlog, "closed", STANDARD, "cold", 0.0, tenant="globex", deadline=9.0)
    add(backlog, "early", STANDARD, BASE_GROUP, 0.0)
    add(backlog, "urgent", STANDARD, BASE_GROUP, 0.0, deadline=10.0)
    assert pop(backlog, 3, now=9.0) == ["urgent", "early"]


def test_a_prefix_that_is_in_the_batch_goes_first_among_its_group() -> None:
    backlog = Backlog[str](10, affine(100))
    add(backlog, "other", STANDARD, BASE_GROUP, 0.0)
    add(backlog, "shared", STANDARD, BASE_GROUP, 0.0, prefix=7)
    assert pop(backlog, 2, EngineView({BASE_GROUP: 1}, prefixes={7})) == ["shared", "other"]


def test_tenants_share_a_lane_by_tokens_and_weight() -> None:
    backlog = Backlog[str](2000, affine(0, quantum=10), weight_of={"acme": 1.0, "globex": 3.0}.__getitem__)
    for _ in range(400):
        add(backlog, "acme", STANDARD, BASE_GROUP, 0.0, tenant="acme", tokens=4)
        add(backlog, "globex", STANDARD, BASE_GROUP, 0.0, tenant="globex", tokens=2)
    served = Counter(pop(backlog, 350))
    assert abs(2 * served["globex"] - 3 * 4 * served["acme"]) <= 3 * 2 * (10 + 4)


def test_a_returning_tenant_has_at_most_a_quantum() -> None:
    backlog = Backlog[str](2000, affine(0, quantum=10))
    for _ in range(300):
        add(backlog, "acme", STANDARD, BASE_GROUP, 0.0, tenant="acme")
    pop(backlog, 200)
    for _ in range(100):
        add(backlog, "globex", STANDARD, BASE_GROUP, 0.0, tenant="globex")
    assert Counter(pop(backlog, 60))["globex"] <= 30 + 2 * 11


def test_a_tenant_over_its_limit_delays_no_other() -> None:
    backlog = Backlog[str](10)
    add(backlog, "limited", STANDARD, BASE_GROUP, 0.0, tenant="acme")
    add(backlog, "free", STANDARD, BASE_GROUP, 0.0, tenant="globex")

    def allows(demand: Demand) -> bool:
        return demand.tenant != "acme"

    assert [each.job for each in backlog.pop(2, allows=allows)] == ["free"]
    assert [reason for reason, _ in backlog.reasons(allows)] == [WaitReason.TENANT_LIMIT]
    assert pop(backlog, 2) == ["limited"]


def test_reasons_for_waiting() -> None:
    backlog = opened(Backlog[str](10, affine(10, quantum=1)), "hot", "late")
    add(backlog, "late", STANDARD, "late", 0.0)
    add(backlog, "hot", STANDARD, "hot", 0.0)
    add(backlog, "unloaded", STANDARD, "closed", 0.0, tenant="globex")
    add(backlog, "full", BATCH, BASE_GROUP, 0.0, tenant="initech")

    def reasons() -> dict[str, WaitReason]:
        return {each.job: reason for reason, waiting in backlog.reasons() for each in waiting}

    full = WaitReason.ENGINE_FULL
    assert reasons() == {"late": full, "hot": full, "unloaded": WaitReason.ADAPTER_LOADING, "full": full}
    assert pop(backlog, 1, EngineView({"hot": 1}, {"hot"})) == ["hot"]
    assert reasons()["late"] == WaitReason.TENANT_OVER_SHARE
    backlog.follow(affine(10, quantum=10))
    backlog.pop(0)
    assert backlog.num_bytes == 0


def test_bytes_are_counted_while_a_job_waits() -> None:
    backlog = Backlog[str](10)
    add(backlog, "large", STANDARD, BASE_GROUP, 0.0, num_bytes=900)
    add(backlog, "small", STANDARD, BASE_GROUP, 0.0, num_bytes=9)
    assert backlog.num_bytes == 909
    pop(backlog, 1)
    assert backlog.num_bytes == 9
    backlog.remove(lambda _job: True)
    assert backlog.num_bytes == 0


class Arrival(NamedTuple):
    """A job in an adversary's sequence; `order` is its order of arrival."""

    order: int
    tenant: str
    group: str
    tokens: int


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("xyz"), st.sampled_from("abcdef"), st.integers(1, 9)),
        st.tuples(st.just("pop"), st.integers(1, 4), st.sets(st.sampled_from("abcdef"))),
    ),
    max_size=120,
)


@given(STEPS, st.integers(0, 30))
def test_no_adversary_overtakes_a_job_by_more_than_the_bound(steps: list[tuple[Any, ...]], bound: int) -> None:
    backlog = opened(Backlog[Arrival](1000, affine(bound, quantum=5)), *"abcdef")
    waiting: list[Arrival] = []
    passed: dict[Arrival, int] = defaultdict(int)
    for number, (action, *arguments) in enumerate([*steps, ("pop", 1000, set())]):
        if action == "add":
            arrival = Arrival(number, *arguments)
            add(backlog, arrival, STANDARD, arrival.group, 0.0, tenant=arrival.tenant, tokens=arrival.tokens)
            waiting.append(arrival)
            continue
        limit, resident = arguments
        for popped in pop(backlog, limit, EngineView(dict.fromkeys(resident, 1), resident)):
            waiting.remove(popped)
            for other in waiting:
                if other.tenant == popped.tenant and other.order < popped.order:
                    passed[other] += popped.tokens
                    assert passed[other] <= bound
    assert not waiting


@given(STEPS, st.integers(1, 20))
def test_tenants_with_waiting_jobs_are_served_equally(steps: list[tuple[Any, ...]], quantum: int) -> None:
    """The bound of `shares.py` holds for all affinities and sizes, over any interval."""
    backlog = opened(Backlog[Arrival](5000, affine(50, quantum=quantum)), *"abcdef")
    size = 9
    sizes = [arguments[-1] for action, *arguments in steps if action == "add"] or [1]
    for number in range(300):
        for tenant in "xyz":
            tokens = sizes[(number * 7 + ord(tenant)) % len(sizes)]
            arrival = Arrival(number, tenant, "abcdef"[(number * ord(tenant)) % 6], tokens)
            add(backlog, arrival, STANDARD, arrival.group, 0.0, tenant=tenant, tokens=tokens)
    served = dict.fromkeys("xyz", 0)
    history = [dict(served)]
    for action, *arguments in steps:
        if action == "pop":
            limit, resident = arguments
            for popped in pop(backlog, limit, EngineView(dict.fromkeys(resident, 1), resident)):
                served[popped.tenant] += popped.tokens
                history.append(dict(served))
    for earlier in history[:: max(1, len(history) // 20)]:
        grown = [served[tenant] - earlier[tenant] for tenant in "xyz"]
        assert max(grown) - min(grown) <= 2 * (quantum + size)
