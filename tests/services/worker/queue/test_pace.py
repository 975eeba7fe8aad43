"""Rates and weights as measured, and the lanes' rules that follow from them."""

import pytest

from engine import StepStats
from schemas.common import Lane
from services.worker.queue.pace import FIRST_TOKENS_PER_S, Pace, prefill_weight


def stats(seconds: float, prefill: int, decode: int, decode_only_s: float = 0.0, decode_only: int = 0) -> StepStats:
    return StepStats(10, seconds, prefill, decode, decode_only_s, decode_only, 0, 0)


def test_bounds_are_seconds_of_the_measured_rate_unless_they_are_set() -> None:
    pace = Pace({Lane.BATCH: 777})
    assert pace.rules()[Lane.STANDARD].overtake_tokens == 10 * FIRST_TOKENS_PER_S
    assert not pace.observe(stats(1.0, 0, 300)), "too short to say anything"
    assert pace.observe(stats(4.0, 800, 800))
    assert pace.tokens_per_s == 400
    rules = pace.rules()
    assert [rules[lane].overtake_tokens for lane in Lane] == [800, 4000, 777]
    assert rules[Lane.STANDARD].quantum_tokens == 500


def test_rates_are_averaged_and_a_restarted_engine_counts_from_zero() -> None:
    pace = Pace({})
    pace.observe(stats(2.0, 0, 800))
    pace.observe(stats(4.0, 0, 1000))
    assert pace.tokens_per_s == pytest.approx(0.7 * 400 + 0.3 * 100)
    pace.restart()
    assert pace.observe(stats(2.0, 0, 200))


def test_a_prompt_token_costs_its_measured_time_relative_to_decoding() -> None:
    measured = stats(10.0, 4000, 600, decode_only_s=4.0, decode_only=400)
    assert prefill_weight(measured) == pytest.approx((10 - 6) / 4000 / 0.01)
    assert prefill_weight(stats(1.0, 100, 100)) is None
    assert prefill_weight(stats(100.0, 10, 10, decode_only_s=0.1, decode_only=10)) == 1.0
