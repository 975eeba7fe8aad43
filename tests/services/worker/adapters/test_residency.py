"""Adapters stay within their budget, and none in use is evicted."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.adapters.residency import Reservation, Residency


def residency(*names: str, budget: int = 100, each: int = 40) -> Residency:
    """`names` are loaded, the first one least recently used."""
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


def test_an_adapter_in_use_is_not_evicted() -> None:
    adapters = residency("a", "b")
    adapters.acquire("a")
    adapters.acquire("b")
    assert adapters.reserve("c", 40, (), urgent=False) == Reservation(granted=False)


def test_an_adapter_with_waiting_jobs_is_evicted_only_for_an_urgent_one() -> None:
    adapters = residency("a", "b")
    assert not adapters.reserve("c", 40, ["a", "b"], urgent=False).granted
    assert adapters.reserve("c", 40, ["a", "b"], urgent=True) == Reservation(granted=True, evict=("b",))


def test_unneeded_adapters_are_evicted_before_needed_ones() -> None:
    adapters = residency("a", "b", "c", budget=120)
    assert adapters.reserve("d", 80, ["c", "a"], urgent=True) == Reservation(granted=True, evict=("b", "a"))


def test_one_that_was_just_loaded_stays_until_a_job_used_it() -> None:
    adapters = Residency(100, min_stay_s=5.0)
    assert adapters.reserve("a", 60, ["a"], urgent=True, now=0.0).granted
    adapters.loaded("a", 60)
    assert not adapters.reserve("b", 60, ["a", "b"], urgent=True, now=1.0).granted
    assert adapters.reserve("b", 60, ["a", "b"], urgent=True, now=5.0).evict == ("a",)
    adapters.loaded("b", 60)
    adapters.acquire("b")
    adapters.release("b")
    assert adapters.reserve("a", 60, ["a", "b"], urgent=True, now=6.0).evict == ("b",)


def test_a_pinned_adapter_goes_last_of_all_and_is_not_drained() -> None:
    adapters = residency("a", "b")
    adapters.pin("a", pinned=True)
    assert adapters.reserve("c", 40, ["b"], urgent=False) == Reservation(granted=False)
    assert adapters.reserve("c", 40, ["b"], urgent=True) == Reservation(granted=True, evict=("b",))
    adapters.loaded("c", 40)
    adapters.acquire("c")
    assert adapters.reserve("d", 40, (), urgent=True) == Reservation(granted=True, evict=("a",))
    other = residency("a", "b")
    other.pin("a", pinned=True)
    other.acquire("a")
    other.acquire("b")
    assert other.reserve("c", 40, (), urgent=True).drain == ("b",)


def test_an_urgent_request_drains_adapters_in_use() -> None:
    adapters = residency("a", "b")
    adapters.acquire("a")
    adapters.acquire("b")
    assert adapters.reserve("c", 40, (), urgent=True) == Reservation(granted=False, drain=("a",))
    adapters.release("a")
    assert adapters.reserve("c", 40, (), urgent=True) == Reservation(granted=True, evict=("a",))


def test_an_adapter_being_loaded_counts_and_is_not_evicted() -> None:
    adapters = residency()
    assert adapters.reserve("a", 60, (), urgent=False).granted
    assert not adapters.is_loaded("a")
    assert not adapters.reserve("b", 60, (), urgent=True).granted
    adapters.drop("a")
    assert adapters.reserve("b", 60, (), urgent=False).granted


def test_users_are_forgotten_when_the_engine_is_lost() -> None:
    adapters = residency("a")
    adapters.acquire("a")
    adapters.clear()
    adapters.release("a")
    assert adapters.used_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.booleans(), st.booleans()), max_size=40))
def test_the_budget_holds_and_no_adapter_in_use_is_evicted(wishes: list[tuple[str, int, bool, bool]]) -> None:
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
