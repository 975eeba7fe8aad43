"""A fleet: the sum of its workers, the same however many processes compute it."""

from typing import Any

import numpy as np
import pytest

from services.simulate.fleet import is_aggregated, simulate
from services.simulate.policies import FIRST_COME, LORAQ, UNBOUNDED, bounded
from services.simulate.traces.routing import Fleet
from services.simulate.traces.trace import Lengths, Synthetic, Trace
from tests.services.simulate.test_worker import model


def trace(**changes: Any) -> Trace:
    given = {"num_jobs": 600, "num_adapters": 40, "num_tenants": 4, "ranks": (8,), "rate_per_s": 60.0}
    return Synthetic(**given | {"prompt": Lengths(20, 0.3), "output": Lengths(12, 0.3)} | changes).draw(1)


def test_a_fleet_serves_every_job_once() -> None:
    report = simulate(trace(), Fleet(4), model(6), LORAQ, processes=1)
    assert report.jobs == sum(lane.jobs for lane in report.lanes.values()) == 600
    assert 0 < report.busy <= 1 <= report.busiest
    assert 0 <= report.hit_rate <= 1


def test_the_processes_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.simulate.fleet.LEAST_JOBS_PER_PROCESS", 100)
    one, two = (simulate(trace(), Fleet(6), model(6), LORAQ, seed=3, processes=count) for count in (1, 2))
    assert one == two


def test_routing_by_adapter_loads_less_than_routing_to_any_worker() -> None:
    affine, anywhere = (
        simulate(trace(), Fleet(4, affine=by_key), model(6), FIRST_COME, processes=1) for by_key in (True, False)
    )
    assert affine.loads < anywhere.loads
    assert affine.hit_rate > anywhere.hit_rate


def test_a_spread_hot_adapter_evens_the_workers_out() -> None:
    hot = trace(exponent=1.5, rate_per_s=0.0)
    alone, spread = (simulate(hot, Fleet(6, 1, spread=count), model(6), LORAQ, processes=1) for count in (1, 6))
    assert spread.busiest < alone.busiest
    assert spread.seconds < alone.seconds


def test_the_bound_holds_in_every_lane_and_grouping_without_one_goes_further() -> None:
    lanes = trace(rate_per_s=0.0)
    rng = np.random.default_rng(0)
    mixed = Trace(lanes.adapters, lanes.at_s, lanes.adapter, rng.integers(0, 3, 600).astype(np.int8), *_lengths(lanes))
    wide = model(4, window=300)
    bound, endless = (simulate(mixed, Fleet(1), wide, policy, processes=1) for policy in (bounded(150), UNBOUNDED))
    assert all(lane.passed_tokens <= 150 for lane in bound.lanes.values())
    assert any(lane.passed_tokens > 150 for lane in endless.lanes.values())
    assert bound.lanes["interactive"].wait_p50_s < bound.lanes["batch"].wait_p50_s


def _lengths(of: Trace) -> tuple[Any, Any]:
    return of.prompt, of.output


def test_long_traces_are_aggregated() -> None:
    assert not is_aggregated(trace())
    assert is_aggregated(trace(num_jobs=10_000, prompt=Lengths(500)))
