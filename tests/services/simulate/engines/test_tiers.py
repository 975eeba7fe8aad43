"""Caches against an independent one, and transfers over their links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulate.engines.tiers import Lru, Tier, Tiers


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 8))
def test_the_least_recently_used_is_evicted(uses: list[int], slots: int) -> None:
    lru = Lru(float(slots))
    for index, use in enumerate(uses):
        recent = list(dict.fromkeys(reversed(uses[:index])))[:slots]
        assert (str(use) in lru) == (use in recent)
        lru.touch(str(use), 1.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=80), st.integers(1, 12))
def test_a_cache_never_holds_more_than_its_budget(uses: list[tuple[int, int]], capacity: int) -> None:
    lru, sizes = Lru(float(capacity)), {}
    for name, size in uses:
        sizes.setdefault(name, size)
        lru.touch(str(name), sizes[name])
        assert sum(each for other, each in sizes.items() if str(other) in lru) <= capacity
        assert (str(name) in lru) == (sizes[name] <= capacity)


def test_a_miss_crosses_every_link_above_the_tier_that_has_it() -> None:
    tiers = Tiers([Tier("host", 10, 0.0, 10.0), Tier("disk", 20, 0.5, 4.0), Tier("store", None, 1.0, 2.0)], threads=2)
    assert tiers.fetch("a", 4, now=0.0) == pytest.approx(1.0 + 2.0 + 0.5 + 1.0 + 0.4)
    assert tiers.fetch("a", 4, now=10.0) == pytest.approx(10.4)
    assert tiers.hits == {"host": 1, "disk": 0, "store": 1}
    assert tiers.num_bytes == {"host": 8, "disk": 4, "store": 4}


def test_transfers_share_a_link_and_wait_for_a_thread() -> None:
    shared = Tiers([Tier("store", None, 1.0, 2.0)], threads=2)
    assert [shared.fetch(name, 4, now=0.0) for name in "ab"] == [3.0, 5.0]
    assert shared.fetch("c", 4, now=0.0) == 7.0
    apart = Tiers([Tier("disk", None, 0.0, 2.0, shared=False)], threads=2)
    assert [apart.fetch(name, 4, now=0.0) for name in "abc"] == [2.0, 2.0, 4.0]
