"""Zipf's law: draws follow it, and the fit finds its exponent."""

import numpy as np
import pytest

from services.simulate.traces.popularity import draw, fit_exponent, zipf_shares


@pytest.mark.parametrize("exponent", [0.8, 1.1, 1.4])
def test_the_exponent_is_found_again(exponent: float) -> None:
    rng = np.random.default_rng(3)
    drawn = draw(zipf_shares(500, exponent), 200_000, rng)
    assert fit_exponent(np.bincount(drawn, minlength=500), 500) == pytest.approx(exponent, abs=0.02)


def test_draws_follow_the_shares() -> None:
    shares = zipf_shares(20, 1.0)
    drawn = np.bincount(draw(shares, 100_000, np.random.default_rng(4)), minlength=20)
    assert drawn / 100_000 == pytest.approx(shares, abs=0.006)


def test_equal_uses_have_exponent_zero() -> None:
    assert fit_exponent(np.full(50, 7), 50) == pytest.approx(0.0, abs=1e-6)
