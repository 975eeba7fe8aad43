"""Costs of steps: the fit finds what it was made of, the roofline its two sides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import InputError
from services.simulate.engines.costs import Equation, Linear, Roofline, Work, fit, non_negative
from services.simulate.engines.hardware import GPUS, MODELS

COEFFICIENT = st.floats(0, 1)


@given(COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT, st.integers(0, 1000))
def test_the_fit_finds_the_costs_that_made_the_steps(a: float, b: float, c: float, d: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = Linear(a, b * 1e-3, c * 1e-3, d * 1e-9)
    works = [Work(int(p), int(r), float(m)) for p, r, m in rng.integers(1, (2048, 64, 10**9), (60, 3))]
    found = fit([Equation(1, work, made.seconds(work)) for work in works])
    for work in works:
        assert found.seconds(work) == pytest.approx(made.seconds(work), rel=1e-3, abs=1e-6)


def test_no_cost_is_below_zero() -> None:
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(features, np.array([3.0, 2.0, 1.0])).tolist() == [pytest.approx(2.0), 0.0]


def test_steps_that_are_alike_calibrate_nothing() -> None:
    with pytest.raises(InputError, match="2 measured steps or runs are too alike"):
        fit([Equation(1, Work(0, 8, 1e6), 0.1), Equation(1, Work(0, 8, 1e6), 0.2)])


def test_the_roofline_is_bound_by_memory_for_few_tokens_and_by_arithmetic_for_many() -> None:
    shape, gpu = MODELS["llama-8b"], GPUS["h200"]
    costs = Roofline(shape, gpu, 1.0, 1.0, 0.0)
    weights = 2 * shape.step_parameters
    assert costs.seconds(Work(0, 1, 0)) == pytest.approx(weights / gpu.bytes_per_s)
    assert costs.seconds(Work(0, 1, 1e9)) == pytest.approx((weights + 1e9) / gpu.bytes_per_s)
    assert costs.seconds(Work(8192, 0, 0)) == pytest.approx(weights * 8192 / gpu.flops)
