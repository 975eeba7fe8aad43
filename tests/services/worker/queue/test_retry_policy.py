"""Delays grow and are bounded."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.queue.retry_policy import MAX_RECHECK_S, MAX_RETRY_DELAY_S, recheck_delay_s, retry_delay_s


@given(st.integers(1, 99), st.floats(0, 60))
def test_retry_delays_grow_up_to_a_minute(attempts: int, first_s: float) -> None:
    assert retry_delay_s(1, first_s) == first_s
    assert first_s <= retry_delay_s(attempts, first_s) <= retry_delay_s(attempts + 1, first_s) <= MAX_RETRY_DELAY_S


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_recheck_delay_never_exceeds_the_bound(cold_for_s: float, bound_s: float) -> None:
    delay_s = recheck_delay_s(cold_for_s, bound_s)
    assert 0 <= delay_s <= MAX_RECHECK_S
    assert cold_for_s + delay_s <= max(bound_s, cold_for_s) * (1 + 1e-9)
