"""The report of the engine benchmark."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine import AdapterTraffic, Output


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Medians over the runs; times in seconds, memory in MB of 10^6 bytes. `wall_all_s` lists each run's duration.

    `first_token_s` is the mean over requests, `first_token_max_s` the maximum. `warm_first_token_s` is measured with a
    single request whose adapter is in the pool; for `cold_first_token_s` the adapter is checked and loaded first, from
    local files. Both are medians of `first_token_repeats`, with the first adapters in turn. A run loads
    `run_adapter_loads` adapters (`run_adapter_mb_in`) into the pool and evicts `run_adapter_mb_out`; `hit_rate` is the
    share of requests that caused no load. `load_average` is the machine's at the end of the runs: a value above
    `threads` means that other processes slowed them down.
    """

    output_tokens_per_s: float
    wall_s: float
    first_token_s: float
    first_token_max_s: float
    warm_first_token_s: float
    cold_first_token_s: float | None
    first_token_repeats: int
    peak_rss_mb: float
    requests: int
    batch: int
    distinct: float
    registered: int
    popularity: str
    prompt_len: int
    new_tokens: int
    repeats: int
    dtype: str
    device: str
    threads: int
    pool_mb: float
    adapter_mb: float
    run_adapter_loads: float
    run_adapter_mb_in: float
    run_adapter_mb_out: float
    hit_rate: float | None
    model_load_s: float
    adapter_load_s: float
    wall_all_s: list[float]
    load_average: float
    machine: str


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all requests; `chosen` holds the adapter of each request and is empty for the base model."""

    wall_s: float
    outputs: list[Output]
    chosen: list[int]
    traffic: AdapterTraffic

    @property
    def first_token_s(self) -> list[float]:
        """The time to the first token of each request, since all were added."""
        return [output.first_token_s or 0.0 for output in self.outputs]


def wall_s(runs: Sequence[Run]) -> float:
    """The median duration of the runs."""
    return statistics.median(run.wall_s for run in runs)


def first_token_s(runs: Sequence[Run]) -> tuple[float, float]:
    """Medians over the runs of the mean and the maximum time to the first token."""
    mean = statistics.median(statistics.mean(run.first_token_s) for run in runs)
    return round(mean, 4), round(statistics.median(max(run.first_token_s) for run in runs), 4)


def traffic(runs: Sequence[Run]) -> tuple[float, float, float, float | None]:
    """Medians of loads, MB in and MB out, and the share of all requests with an adapter that caused no load."""
    loads = sum(run.traffic.loads for run in runs)
    named = sum(len(run.chosen) for run in runs)
    return (
        statistics.median(run.traffic.loads for run in runs),
        round(statistics.median(run.traffic.bytes_in for run in runs) / 1e6, 1),
        round(statistics.median(run.traffic.bytes_out for run in runs) / 1e6, 1),
        round(1 - loads / named, 4) if named else None,
    )


def distinct(runs: Sequence[Run]) -> float:
    """The median number of different adapters in a run."""
    return statistics.median(len(set(run.chosen)) for run in runs)
