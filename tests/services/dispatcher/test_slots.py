"""Nobody's receiver holds up another's."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.dispatcher import slots
from services.dispatcher.slots import HostSlots, Room

HOSTS = [f"host-{number}:443" for number in range(6)]


def take_all(pool: HostSlots, host: str) -> int:
    taken = 0
    while pool.take(host):
        taken += 1
    return taken


def test_a_new_host_starts_small_and_earns_more() -> None:
    pool = HostSlots(total=64, per_host=8)
    assert take_all(pool, "a") == slots.START_SLOTS
    for _ in range(20):
        pool.give_back("a", timed_out=False)
        assert pool.take("a")
    for _ in range(slots.START_SLOTS):
        pool.give_back("a", timed_out=False)
    assert take_all(pool, "a") == 8


def test_a_host_that_hangs_keeps_one_slot_until_it_answers() -> None:
    pool = HostSlots(total=64, per_host=8)
    assert pool.take("a")
    pool.give_back("a", timed_out=True)
    assert take_all(pool, "a") == 1
    assert pool.room(10).by_host == {"a": 0}
    pool.give_back("a", timed_out=False)
    assert take_all(pool, "a") == 2


def test_hosts_that_hang_never_hold_more_than_half_of_the_slots() -> None:
    pool = HostSlots(total=8, per_host=8)
    for host in HOSTS:
        assert pool.take(host)
        pool.give_back(host, timed_out=True)
    assert sum(take_all(pool, host) for host in HOSTS) == 4
    assert pool.room(10).by_host == dict.fromkeys(HOSTS, 0)
    assert take_all(pool, "healthy") == slots.START_SLOTS


def test_one_slot_is_enough_to_work() -> None:
    pool = HostSlots(total=1, per_host=8)
    for timed_out in (True, False, True):
        assert pool.take("a")
        assert not pool.take("b")
        pool.give_back("a", timed_out=timed_out)


def test_only_so_many_hosts_are_remembered() -> None:
    pool = HostSlots(total=2, per_host=2)
    for number in range(slots.REMEMBERED_HOSTS + 5):
        pool.take(str(number))
        pool.give_back(str(number), timed_out=True)
    pool.check_integrity()
    assert pool.room(1) == Room(total=1, by_host={}, other_hosts=2)


class AnyTraffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = HostSlots(total=5, per_host=3)
        self.in_flight: list[str] = []

    @rule(host=st.sampled_from(HOSTS))
    def take(self, host: str) -> None:
        room = self.pool.room(100)
        told_full = room.total == 0 or room.by_host.get(host, room.other_hosts) == 0
        taken = self.pool.take(host)
        assert taken is not told_full
        if taken:
            self.in_flight.append(host)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), timed_out=st.booleans())
    def give_back(self, data: st.DataObject, timed_out: bool) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        self.pool.give_back(self.in_flight.pop(index), timed_out)

    @invariant()
    def bounds_hold(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free == 5 - len(self.in_flight)

    @invariant()
    def an_idle_pool_serves_anybody(self) -> None:
        if not self.in_flight:
            assert self.pool.room(100) == Room(total=5, by_host={}, other_hosts=2)


TestAnyTraffic = AnyTraffic.TestCase
