"""Adapters stay within their budget, and none that a job uses is evicted."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.adapters.residency import Reservation, Residency


def residency(*names: str, budget: int = 100, each: int = 40) -> Residency:
    """`names` are loaded, the first the least recently used."""
    made = Residency(budget)
    for name in names:
        assert made.reserve(name, each, (), urgent=False).granted
        made.loaded(name, each)
    return made


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    adapters = residency("a", "b")
    adapters.acquire("a")
    adapters.release("a")
    assert adapters.reserve("c", 40, (), urgent=False) == Reservation(granted=True, evict=("b",))
    assert adapters.digests() == ["a", "c"]


def test_an_adapter_in_use_stays() -> None:
    adapters = residency("a", "b")
    adapters.acquire("a")
    adapters.acquire("b")
    assert adapters.reserve("c", 40, (), urgent=False) == Reservation(granted=False)


def test_one_with_waiting_jobs_goes_only_for_an_urgent_one() -> None:
    adapters = residency("a", "b")
    assert not adapters.reserve("c", 40, {"a", "b"}, urgent=False).granted
    assert adapters.reserve("c", 40, {"a", "b"}, urgent=True) == Reservation(granted=True, evict=("a",))


def test_an_urgent_one_drains_what_is_in_use() -> None:
    adapters = residency("a", "b")
    adapters.acquire("a")
    adapters.acquire("b")
    assert adapters.reserve("c", 40, (), urgent=True) == Reservation(granted=False, drain=("a",))
    adapters.release("a")
    assert adapters.reserve("c", 40, (), urgent=True) == Reservation(granted=True, evict=("a",))


def test_one_being_loaded_is_counted_and_stays() -> None:
    adapters = residency()
    assert adapters.reserve("a", 60, (), urgent=False).granted
    assert not adapters.is_loaded("a")
    assert not adapters.reserve("b", 60, (), urgent=True).granted
    adapters.drop("a")
    assert adapters.reserve("b", 60, (), urgent=False).granted


def test_users_of_a_lost_engine_are_forgotten_with_it() -> None:
    adapters = residency("a")
    adapters.acquire("a")
    adapters.clear()
    adapters.release("a")
    assert adapters.used_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.booleans(), st.booleans()), max_size=40))
def test_the_budget_holds_and_no_used_adapter_goes(wishes: list[tuple[str, int, bool, bool]]) -> None:
    adapters = Residency(100)
    used: set[str] = set()
    for name, num_bytes, urgent, use in wishes:
        if name not in adapters:
            reservation = adapters.reserve(name, num_bytes, (), urgent=urgent)
            assert not used & set(reservation.evict)
            if reservation.granted:
                adapters.loaded(name, num_bytes)
        if use and adapters.is_loaded(name):
            adapters.acquire(name)
            used.add(name)
        elif name in used:
            adapters.release(name)
            used.discard(name) if adapters._residents[name].users == 0 else None
        assert adapters.used_bytes <= 100
