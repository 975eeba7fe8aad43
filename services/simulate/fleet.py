"""A fleet: every worker's jobs by routing, each worker on its own, and what they add up to. Pure: no clock, seeded."""

import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.simulate.policies import Policy
from services.simulate.traces.routing import Fleet, route
from services.simulate.traces.trace import Trace
from services.simulate.worker import LANES, Jobs, Served, Worker, WorkerModel

STEPWISE_TOKENS = 4_000_000
"""Prompt and output tokens of a trace above which steps are aggregated."""
LEAST_JOBS_PER_PROCESS = 20_000


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Seconds from arrival to the hand-over to the engine, and to the end; `passed_tokens` is the most of any job."""

    jobs: int
    wait_p50_s: float
    wait_p99_s: float
    total_p50_s: float
    total_p99_s: float
    passed_tokens: float


@dataclass(frozen=True, slots=True)
class Report:
    """How a fleet served a trace. `seconds` is until the last job ended, `busy` the workers' share of it in steps.

    `hit_rate` is the share of jobs whose adapter was on the device or on its way there when they were handed over;
    `cold_p99_s` is the total time of the others. `busiest` is the busiest worker's time in steps relative to the mean.
    """

    policy: str
    model: str
    jobs: int
    seconds: float
    tokens_per_s: float
    busy: float
    busiest: float
    rows_per_step: float
    adapters_per_step: float
    adapter_mb_per_step: float
    loads: int
    gb_loaded: float
    hit_rate: float
    cold_p99_s: float
    tier_loads: dict[str, int]
    tier_gb: dict[str, float]
    lanes: dict[str, LaneReport]


def is_aggregated(trace: Trace) -> bool:
    """Whether the trace is too long to plan every step."""
    return int(trace.prompt.sum(dtype=np.int64) + trace.output.sum(dtype=np.int64)) > STEPWISE_TOKENS


@dataclass(frozen=True, slots=True)
class _Part:
    """The jobs of one worker: `chosen` are their places in the trace."""

    model: WorkerModel
    policy: Policy
    chosen: npt.NDArray[np.int64]
    jobs: Jobs
    ranks: dict[str, int]


def simulate(
    trace: Trace, fleet: Fleet, model: WorkerModel, policy: Policy, seed: int = 0, processes: int | None = None
) -> Report:
    """Serve the trace; the same for the same seed, however many processes share the workers."""
    rng = np.random.default_rng(seed)
    worker = route(trace.adapter, trace.adapters.key, fleet, rng)
    order = np.argsort(worker, kind="stable")
    bounds = np.searchsorted(worker[order], np.arange(fleet.num_workers + 1))
    wanted = processes or os.cpu_count() or 1
    workers = min(wanted, max(1, len(trace) // LEAST_JOBS_PER_PROCESS), fleet.num_workers)
    totals = _Totals(trace, fleet.num_workers)
    parts = _parts(trace, model, policy, order, bounds)
    for chosen, served in _served(parts, workers):
        totals.add(chosen, served)
    return totals.report(policy.name, "aggregated steps" if model.is_aggregated else "every step")


def _parts(
    trace: Trace, model: WorkerModel, policy: Policy, order: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64]
) -> Iterator[_Part]:
    names = trace.adapters
    for first, last in itertools.pairwise(bounds.tolist()):
        chosen = order[first:last]
        numbers = np.unique(trace.adapter[chosen]).tolist()
        ranks = {key: names.rank[number] for number in numbers if (key := names.key[number]) is not None}
        yield _Part(model, policy, chosen, trace.of(chosen), ranks)


def _served(parts: Iterable[_Part], processes: int) -> Iterator[tuple[npt.NDArray[np.int64], Served]]:
    if processes == 1:
        for part in parts:
            yield part.chosen, _serve(part)
        return
    with ProcessPoolExecutor(processes) as pool:
        waiting: list[tuple[npt.NDArray[np.int64], Any]] = []
        for part in parts:
            waiting.append((part.chosen, pool.submit(_serve, part)))
            if len(waiting) >= 2 * processes:
                chosen, result = waiting.pop(0)
                yield chosen, result.result()
        for chosen, result in waiting:
            yield chosen, result.result()


def _serve(part: _Part) -> Served:
    return Worker(part.model, part.policy, part.jobs, part.ranks).run()


class _Totals:
    """Adds up the workers."""

    def __init__(self, trace: Trace, num_workers: int) -> None:
        self._trace, self._num_workers = trace, num_workers
        self._handed, self._finished = np.zeros(len(trace)), np.full(len(trace), np.nan)
        self._cold = np.zeros(len(trace), bool)
        self._served: list[Served] = []

    def add(self, chosen: npt.NDArray[np.int64], served: Served) -> None:
        self._handed[chosen], self._finished[chosen] = served.handed_at, served.finished_at
        self._cold[chosen] = served.was_cold
        self._served.append(_without_jobs(served))

    def report(self, policy: str, model: str) -> Report:
        served, trace = self._served, self._trace
        assert not np.isnan(self._finished).any(), "every job ends"
        seconds = max(each.end_s for each in served)
        busy = [each.busy_s for each in served]
        steps = max(1, sum(each.steps for each in served))
        total = self._finished - trace.at_s
        return Report(
            policy=policy,
            model=model,
            jobs=len(trace),
            seconds=round(seconds, 3),
            tokens_per_s=round(float(trace.output.sum(dtype=np.int64)) / seconds, 1),
            busy=round(sum(busy) / seconds / self._num_workers, 4),
            busiest=round(max(busy) / (sum(busy) / self._num_workers), 2),
            rows_per_step=round(sum(each.rows for each in served) / steps, 2),
            adapters_per_step=round(sum(each.adapters for each in served) / steps, 2),
            adapter_mb_per_step=round(sum(each.adapter_bytes for each in served) / steps / 1e6, 2),
            loads=sum(each.loads for each in served),
            gb_loaded=round(sum(each.load_bytes for each in served) / 1e9, 3),
            hit_rate=round(1 - float(self._cold.mean()), 4),
            cold_p99_s=_quantile(total[self._cold], 0.99),
            tier_loads={name: sum(each.tier_hits[name] for each in served) for name in served[0].tier_hits},
            tier_gb={
                name: round(sum(each.tier_bytes[name] for each in served) / 1e9, 3) for name in served[0].tier_bytes
            },
            lanes=self._lanes(total),
        )

    def _lanes(self, total: npt.NDArray[np.float64]) -> dict[str, LaneReport]:
        wait = self._handed - self._trace.at_s
        reports = {}
        for number, lane in enumerate(LANES):
            mine = self._trace.lane == number
            if mine.any():
                reports[str(lane)] = LaneReport(
                    int(mine.sum()),
                    _quantile(wait[mine], 0.5),
                    _quantile(wait[mine], 0.99),
                    _quantile(total[mine], 0.5),
                    _quantile(total[mine], 0.99),
                    max(each.passed_tokens.get(lane, 0.0) for each in self._served),
                )
        return reports


def _without_jobs(served: Served) -> Served:
    return replace(served, handed_at=[], finished_at=[], was_cold=[])


def _quantile(values: npt.NDArray[np.float64], share: float) -> float:
    return round(float(np.quantile(values, share)), 4) if len(values) else 0.0
