"""What a worker has served lately."""

import pytest

from services.routing.load import BUSIEST, WINDOW_S, LoadMeter

ACME, OTHER = ("acme", "tone"), ("acme", "other")


def test_tokens_are_counted_by_adapter_and_forgotten_after_a_minute() -> None:
    meter = LoadMeter(100.0)
    meter.ended(ACME, 30, 101.0)
    meter.ended(OTHER, 50, 131.0)
    meter.ended(None, 20, 131.0)
    assert meter.tokens(131.0) == 100
    assert meter.busiest(131.0) == {OTHER: 50, ACME: 30}
    assert list(meter.busiest(131.0)) == [OTHER, ACME], "the busiest first"
    assert meter.busiest(101.0 + WINDOW_S + 5) == {OTHER: 50}
    assert meter.tokens(131.0 + WINDOW_S + 5) == 0


def test_only_the_busiest_are_named() -> None:
    meter = LoadMeter(0.0)
    for number in range(BUSIEST + 5):
        meter.ended(("acme", f"a{number}"), number + 1, 1.0)
    busiest = meter.busiest(1.0)
    assert len(busiest) == BUSIEST
    assert ("acme", "a0") not in busiest
    assert meter.tokens(1.0) == sum(range(1, BUSIEST + 6))


def test_a_steady_rate_is_measured() -> None:
    meter = LoadMeter(0.0)
    assert meter.tokens_per_s(0.0) == 0
    for tenth in range(400):
        meter.ended(ACME, 7, tenth / 10)
    assert meter.tokens_per_s(40.0) == pytest.approx(70, rel=0.1)
    assert meter.tokens_per_s(100.0) == 0
