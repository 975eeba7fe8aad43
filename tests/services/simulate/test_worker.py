"""A worker in simulated time: every job ends once, bounds hold, and the coarse engine stays near the exact one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.simulate.engines.costs import Linear
from services.simulate.engines.hardware import ModelShape
from services.simulate.engines.model import EngineModel
from services.simulate.engines.tiers import Tier
from services.simulate.policies import FIRST_COME, LORAQ, UNBOUNDED, Policy, bounded
from services.simulate.staging import StagingModel
from services.simulate.worker import Jobs, Served, Worker, WorkerModel

SHAPE = ModelShape(2, 128, 256, 128, 64, 1000)
COSTS = Linear(0.01, 1e-4, 1e-3, 1e-8)
PAGE = SHAPE.pages().bytes_per_page
ADAPTER_PAGES = SHAPE.adapter_pages(8, SHAPE.pages())
TIERS = (Tier("host", 30.0 * PAGE, 1e-4, 1e8), Tier("store", None, 0.02, 1e7))


def model(num_adapters: float, batch: int = 4, window: int = 16, **changes: Any) -> WorkerModel:
    """A worker with room for about that many adapters next to its batch."""
    num_pages = round(num_adapters * ADAPTER_PAGES) + 4 * batch
    return replace(WorkerModel(EngineModel(SHAPE, COSTS, num_pages, batch, 64), TIERS, window), **changes)


JOB = st.tuples(
    st.floats(0, 2),
    st.integers(0, 7),
    st.sampled_from(["acme", "globex"]),
    st.integers(0, 2),
    st.integers(1, 60),
    st.integers(1, 20),
)
MODEL = st.builds(
    lambda adapters, aggregated, staged: model(
        adapters, is_aggregated=aggregated, staging=StagingModel(5.0 * ADAPTER_PAGES * PAGE, 1e8) if staged else None
    ),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
POLICY = st.sampled_from([FIRST_COME, UNBOUNDED, LORAQ, bounded(0), bounded(60)])


def jobs_of(rows: Sequence[tuple[float, int, str, int, int, int]]) -> Jobs:
    """Adapter 0 is the base model; an adapter belongs to its tenant."""
    ordered = sorted(rows)
    groups = [f"{row[2]}/{row[1]}" if row[1] else "" for row in ordered]
    return Jobs([row[0] for row in ordered], groups, *([row[field] for row in ordered] for field in (2, 3, 4, 5)))


def serve(worker: WorkerModel, policy: Policy, jobs: Jobs) -> Served:
    return Worker(worker, policy, jobs, {group: 8 for group in jobs.group if group}).run()


@settings(deadline=None, max_examples=60)
@given(st.lists(JOB, min_size=1, max_size=40), MODEL, POLICY)
def test_every_job_ends_once_and_none_before_it_arrives(rows: Any, worker: WorkerModel, policy: Policy) -> None:
    jobs = jobs_of(rows)
    served = serve(worker, policy, jobs)
    for at, handed, finished in zip(jobs.at_s, served.handed_at, served.finished_at, strict=True):
        assert at <= handed < finished <= served.end_s
    assert served.prefill_tokens + served.rows >= sum(jobs.output)
    assert served.busy_s <= served.end_s + 1e-6
    if not worker.is_aggregated:
        assert served.loads >= len({group for group in jobs.group if group})


@settings(deadline=None, max_examples=60)
@given(st.lists(JOB, min_size=1, max_size=60), MODEL, st.integers(0, 300))
def test_no_job_is_passed_by_more_than_the_bound(rows: Any, worker: WorkerModel, bound: int) -> None:
    served = serve(worker, bounded(bound), jobs_of(rows))
    assert all(passed <= bound for passed in served.passed_tokens.values())


def skewed(count: int, num_adapters: int, gap_s: float) -> Jobs:
    """Jobs of one tenant whose adapters repeat in a fixed irregular order."""
    groups = [f"acme/{number * number * 7 % 23 % num_adapters + 1}" for number in range(count)]
    lengths = [4 + number * 5 % 17 for number in range(count)]
    return Jobs(
        [gap_s * number for number in range(count)], groups, ["acme"] * count, [1] * count, [20] * count, lengths
    )


@pytest.mark.parametrize("gap_s", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("policy", [FIRST_COME, UNBOUNDED, bounded(400)], ids=lambda policy: policy.name)
def test_the_aggregated_engine_stays_near_the_exact_one(policy: Policy, gap_s: float) -> None:
    jobs = skewed(400, 12, gap_s)
    exact, coarse = (serve(model(7, is_aggregated=coarse), policy, jobs) for coarse in (False, True))
    assert coarse.end_s == pytest.approx(exact.end_s, rel=0.1)
    assert coarse.busy_s == pytest.approx(exact.busy_s, rel=0.12)
    assert sum(coarse.handed_at) == pytest.approx(sum(exact.handed_at), rel=0.1)


def test_grouping_saves_loads_and_first_come_passes_nobody() -> None:
    jobs = skewed(400, 12, 0.0)
    first, bound, endless = (serve(model(4), policy, jobs) for policy in (FIRST_COME, bounded(300), UNBOUNDED))
    assert first.passed_tokens == {"standard": 0}
    assert 0 < bound.passed_tokens["standard"] <= 300
    assert endless.loads < first.loads
    assert bound.loads < first.loads


def test_a_run_repeats_itself() -> None:
    jobs = skewed(100, 12, 0.01)
    assert serve(model(5), LORAQ, jobs) == serve(model(5), LORAQ, jobs)


def test_an_adapter_that_is_not_known_is_fetched_before_its_jobs_start() -> None:
    jobs = Jobs([0.0], ["acme/1"], ["acme"], [1], [4], [2])
    served = serve(model(2, staging=StagingModel(1e9, 1e6)), LORAQ, jobs)
    num_bytes = ADAPTER_PAGES * PAGE
    assert served.handed_at[0] == pytest.approx(0.02 + num_bytes / 1e7 + 1e-4 + num_bytes / 1e8 + num_bytes / 1e6)
    assert served.tier_hits == {"host": 1, "store": 1}
