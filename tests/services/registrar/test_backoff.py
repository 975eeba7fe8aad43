"""Delays double per adapter up to a minute, independently of other adapters."""

from hypothesis import given
from hypothesis import strategies as st

from services.registrar.backoff import FIRST_DELAY_S, LONGEST_DELAY_S, Backoff


@given(st.integers(1, 20))
def test_delays_double_up_to_the_longest(failures: int) -> None:
    backoff = Backoff()
    delays = [backoff.failed("a", now=0.0) for _ in range(failures)]
    assert delays == [min(FIRST_DELAY_S * 2**number, LONGEST_DELAY_S) for number in range(failures)]


def test_a_key_waits_for_its_own_delay_only() -> None:
    backoff = Backoff()
    backoff.failed("a", now=10.0)
    backoff.failed("b", now=10.5)
    assert backoff.waiting(now=10.9) == ["a", "b"]
    assert backoff.waiting(now=11.2) == ["b"]
    assert backoff.waiting(now=12.0) == []


def test_a_settled_key_starts_over() -> None:
    backoff = Backoff()
    backoff.failed("a", now=0.0)
    backoff.failed("a", now=0.0)
    backoff.settled("a")
    assert backoff.waiting(now=0.0) == []
    assert backoff.failed("a", now=0.0) == FIRST_DELAY_S
