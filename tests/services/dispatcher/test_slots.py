"""A slow receiver does not delay the others."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.dispatcher import slots
from services.dispatcher.slots import Capacity, HostSlots

HOSTS = [f"host-{number}:443" for number in range(6)]


def acquire_all(pool: HostSlots, host: str) -> int:
    acquired = 0
    while pool.acquire(host):
        acquired += 1
    return acquired


def test_a_new_host_starts_with_few_slots_and_gains_more() -> None:
    pool = HostSlots(total=64, per_host=8)
    assert acquire_all(pool, "a") == slots.START_SLOTS
    for _ in range(20):
        pool.release("a", timed_out=False)
        assert pool.acquire("a")
    for _ in range(slots.START_SLOTS):
        pool.release("a", timed_out=False)
    assert acquire_all(pool, "a") == 8


def test_a_slow_host_has_one_slot_until_it_responds_in_time() -> None:
    pool = HostSlots(total=64, per_host=8)
    assert pool.acquire("a")
    pool.release("a", timed_out=True)
    assert acquire_all(pool, "a") == 1
    assert pool.capacity(10).by_host == {"a": 0}
    pool.release("a", timed_out=False)
    assert acquire_all(pool, "a") == 2


def test_slow_hosts_never_hold_more_than_half_of_the_slots() -> None:
    pool = HostSlots(total=8, per_host=8)
    for host in HOSTS:
        assert pool.acquire(host)
        pool.release(host, timed_out=True)
    assert sum(acquire_all(pool, host) for host in HOSTS) == 4
    assert pool.capacity(10).by_host == dict.fromkeys(HOSTS, 0)
    assert acquire_all(pool, "healthy") == slots.START_SLOTS


def test_one_slot_is_enough() -> None:
    pool = HostSlots(total=1, per_host=8)
    for timed_out in (True, False, True):
        assert pool.acquire("a")
        assert not pool.acquire("b")
        pool.release("a", timed_out=timed_out)


def test_the_number_of_remembered_hosts_is_limited() -> None:
    pool = HostSlots(total=2, per_host=2)
    for number in range(slots.REMEMBERED_HOSTS + 5):
        pool.acquire(str(number))
        pool.release(str(number), timed_out=True)
    pool.check_integrity()
    assert pool.capacity(1) == Capacity(total=1, by_host={}, other_hosts=2)


class AnyTraffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = HostSlots(total=5, per_host=3)
        self.in_flight: list[str] = []

    @rule(host=st.sampled_from(HOSTS))
    def acquire(self, host: str) -> None:
        capacity = self.pool.capacity(100)
        reported_full = capacity.total == 0 or capacity.by_host.get(host, capacity.other_hosts) == 0
        acquired = self.pool.acquire(host)
        assert acquired is not reported_full
        if acquired:
            self.in_flight.append(host)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), timed_out=st.booleans())
    def release(self, data: st.DataObject, timed_out: bool) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        self.pool.release(self.in_flight.pop(index), timed_out)

    @invariant()
    def limits_hold(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free == 5 - len(self.in_flight)

    @invariant()
    def an_idle_pool_serves_any_host(self) -> None:
        if not self.in_flight:
            assert self.pool.capacity(100) == Capacity(total=5, by_host={}, other_hosts=2)


TestAnyTraffic = AnyTraffic.TestCase
