"""The breaker opens when most jobs of several tenants fail, and never because of a single tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.supervision.breaker import MAX_DOUBLINGS, Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(window_s=60.0, min_jobs=40, min_tenants=2, ratio=0.8, probe_after_s=30.0)
TENANTS = st.sampled_from(["a", "b", "c", "d", "e"])


def breaker_after(jobs: list[tuple[str, bool]], limits: BreakerLimits = LIMITS, now: float = 0.0) -> Breaker:
    breaker = Breaker(limits)
    record(breaker, jobs, now)
    return breaker


def record(breaker: Breaker, jobs: list[tuple[str, bool]], now: float) -> None:
    for tenant, bad in jobs:
        breaker.record(tenant, now, bad=bad)


def test_it_opens_when_all_jobs_of_several_tenants_fail() -> None:
    breaker = breaker_after([("a", True), ("b", True)] * 20)
    assert breaker.tick(1.0) is BreakerState.OPEN
    assert breaker_after([("a", True), ("b", True)] * 19).tick(1.0) is BreakerState.CLOSED


@given(st.integers(0, 100_000), st.lists(st.tuples(TENANTS, st.just(False)), max_size=300))
def test_no_flood_of_one_tenant_opens_it_with_any_traffic_of_others(
    flood: int, neighbours: list[tuple[str, bool]]
) -> None:
    breaker = breaker_after(neighbours)
    for _ in range(min(flood, 2000)):
        breaker.record("hostile", 0.0, bad=True)
    assert breaker.tick(1.0) is BreakerState.CLOSED


@given(st.lists(st.tuples(TENANTS, st.booleans()), max_size=300), st.integers(2, 6), st.floats(0.51, 1.0))
def test_it_opens_only_if_at_least_the_ratio_of_the_minimum_tenants_is_affected(
    jobs: list[tuple[str, bool]], min_tenants: int, ratio: float
) -> None:
    limits = BreakerLimits(60.0, 24, min_tenants, ratio, 30.0)
    affected = {tenant for tenant, bad in jobs if bad}
    if breaker_after(jobs, limits).tick(1.0) is BreakerState.OPEN:
        assert len(affected) >= ratio * min_tenants
        assert sum(bad for _, bad in jobs) >= ratio * limits.min_jobs


@given(st.lists(st.tuples(TENANTS, st.booleans()), min_size=1, max_size=300), st.randoms())
def test_the_order_within_a_window_does_not_matter(jobs: list[tuple[str, bool]], random) -> None:
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert breaker_after(jobs).tick(1.0) == breaker_after(shuffled).tick(1.0)


def test_jobs_older_than_the_window_are_forgotten() -> None:
    breaker = breaker_after([("a", True), ("b", True)] * 19)
    record(breaker, [("a", True), ("b", True)] * 19, now=61.0)
    assert breaker.tick(61.5) is BreakerState.CLOSED
    record(breaker, [("a", True), ("b", True)], now=62.0)
    assert breaker.tick(62.5) is BreakerState.OPEN


def test_a_disabled_breaker_stays_closed() -> None:
    assert (
        breaker_after([("a", True), ("b", True)] * 500, BreakerLimits(60.0, 0, 2, 0.8, 30.0)).tick(1.0)
        is BreakerState.CLOSED
    )


def test_it_probes_after_its_delay_and_closes_when_jobs_succeed() -> None:
    breaker = breaker_after([("a", True), ("b", True)] * 20)
    assert [breaker.tick(now) for now in (1.0, 30.9, 31.0)] == ["open", "open", "probing"]
    record(breaker, [("a", False)] * (LIMITS.probe_jobs - 1), 32.0)
    assert breaker.tick(32.0) is BreakerState.PROBING
    record(breaker, [("a", False)], 33.0)
    assert breaker.tick(33.0) is BreakerState.CLOSED


def test_the_delay_doubles_while_probes_fail_up_to_a_bound() -> None:
    breaker, now, waits = breaker_after([("a", True), ("b", True)] * 20), 1.0, []
    assert breaker.tick(now) is BreakerState.OPEN
    for _ in range(MAX_DOUBLINGS + 3):
        waits.append(breaker.open_until - now)
        now = breaker.open_until
        assert breaker.tick(now) is BreakerState.PROBING
        record(breaker, [("a", True), ("b", True)] * (LIMITS.probe_jobs // 2), now)
        assert breaker.tick(now) is BreakerState.OPEN
    assert waits == [30.0 * 2 ** min(turn, MAX_DOUBLINGS) for turn in range(MAX_DOUBLINGS + 3)]


def test_a_probe_with_garbage_of_a_single_tenant_does_not_keep_it_open() -> None:
    breaker = breaker_after([("a", True), ("b", True)] * 20)
    breaker.tick(1.0)
    breaker.tick(31.0)
    record(breaker, [("hostile", True)] * 500, 31.0)
    assert breaker.tick(31.5) is BreakerState.CLOSED


@pytest.mark.parametrize("gap", [1.0, 61.0])
def test_the_delay_is_reset_only_after_a_window_without_opening(gap: float) -> None:
    breaker = breaker_after([("a", True), ("b", True)] * 20)
    breaker.tick(1.0)
    breaker.tick(31.0)
    record(breaker, [("a", True), ("b", True)] * 5, 31.0)
    breaker.tick(31.0)
    breaker.tick(91.0)
    record(breaker, [("a", False)] * 10, 91.0)
    assert breaker.tick(91.0) is BreakerState.CLOSED
    now = 91.0 + gap
    breaker.tick(now)
    record(breaker, [("a", True), ("b", True)] * 20, now)
    assert breaker.tick(now) is BreakerState.OPEN
    assert breaker.open_until - now == (60.0 if gap < 60 else 30.0)
