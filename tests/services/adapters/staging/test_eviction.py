"""Eviction: least recently used first, never an entry in use, no more than needed."""

from hypothesis import given
from hypothesis import strategies as st

from services.adapters.staging.eviction import Entry, plan_eviction

entries = st.lists(
    st.builds(
        Entry,
        digest=st.text("abcdef", min_size=4, max_size=8),
        size_bytes=st.integers(0, 100),
        last_used=st.integers(0, 20).map(float),
        in_use=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda entry: entry.digest,
)
sizes = st.integers(0, 300)


@given(present=entries, incoming=sizes, budget=sizes)
def test_a_plan_makes_room_and_keeps_entries_in_use(present: list[Entry], incoming: int, budget: int) -> None:
    victims = plan_eviction(present, incoming, budget)
    in_use = sum(entry.size_bytes for entry in present if entry.in_use)
    assert (victims is None) == (in_use + incoming > budget)
    if victims is not None:
        kept = [entry for entry in present if entry not in victims]
        assert sum(entry.size_bytes for entry in kept) + incoming <= budget
        assert not any(victim.in_use for victim in victims)


@given(present=entries, incoming=sizes, budget=sizes)
def test_no_more_is_evicted_than_needed(present: list[Entry], incoming: int, budget: int) -> None:
    victims = plan_eviction(present, incoming, budget)
    if victims:
        spared = [entry for entry in present if entry not in victims[:-1]]
        assert sum(entry.size_bytes for entry in spared) + incoming > budget


@given(present=entries, incoming=sizes, budget=sizes)
def test_the_least_recently_used_are_evicted_first(present: list[Entry], incoming: int, budget: int) -> None:
    victims = plan_eviction(present, incoming, budget)
    if victims:
        kept_idle = [entry for entry in present if entry not in victims and not entry.in_use]
        newest = max(victim.last_used for victim in victims)
        assert all(entry.last_used >= newest for entry in kept_idle)
