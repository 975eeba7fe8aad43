"""The engine benchmark: a workload that depends on its parameters alone, so that token ids can be compared."""

import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engine import Engine, EngineConfig, Request, SamplingParams
from services.bench.engine import report as reports
from services.bench.engine.adapters import cycle, zipf
from services.bench.engine.report import EngineReport, Run

FIRST_TOKEN_ID = 17
"""Lower ids are special tokens in the model of the published figures."""
LONE_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of exactly `prompt_len` random tokens, each generating `new_tokens` greedily.

    With popularity `cycle` they use the first `distinct` adapters in turn, with `zipf` any of the registered ones.
    """

    requests: int
    distinct: int
    prompt_len: int
    new_tokens: int
    repeats: int
    cold: bool
    popularity: str = "cycle"


def prompt(index: int, length: int, vocabulary: int) -> list[int]:
    """The prompt of request `index`, the same in every run and on every machine."""
    rng = random.Random(f"p7-{index}")
    return [rng.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(length)]


def run_engine(config: EngineConfig, workload: Workload, adapters: Sequence[Path], progress: TextIO) -> EngineReport:
    """Load the model and the adapters, warm up once, measure `repeats` runs and report."""
    started = time.perf_counter()
    engine = Engine(config)
    model_load_s = time.perf_counter() - started
    infos = [engine.load_adapter(str(index), path) for index, path in enumerate(adapters)]
    adapter_load_s = time.perf_counter() - started - model_load_s
    prompts = [prompt(i, workload.prompt_len, engine.model_config.vocab_size) for i in range(workload.requests)]
    runs = _runs(engine, workload, prompts, len(adapters), progress)
    load_average = os.getloadavg()[0]
    warm, cold = lone_first_tokens(engine, prompts[0], adapters, cold=workload.cold)
    wall_s, first_token = reports.wall_s(runs), reports.first_token_s(runs)
    loads, mb_in, mb_out, hit_rate = reports.traffic(runs)
    return EngineReport(
        output_tokens_per_s=round(workload.requests * workload.new_tokens / wall_s, 2),
        wall_s=round(wall_s, 6),
        first_token_s=first_token[0],
        first_token_max_s=first_token[1],
        warm_first_token_s=warm,
        cold_first_token_s=cold,
        first_token_repeats=LONE_REPEATS,
        peak_rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
        requests=workload.requests,
        batch=config.max_batch_size,
        distinct=reports.distinct(runs),
        registered=len(adapters),
        popularity=workload.popularity,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        repeats=workload.repeats,
        dtype=config.dtype,
        device=config.device,
        threads=config.num_threads,
        pool_mb=round(config.pool_bytes / 1e6, 1),
        adapter_mb=round(sum(info.num_bytes for info in infos) / 1e6, 1),
        run_adapter_loads=loads,
        run_adapter_mb_in=mb_in,
        run_adapter_mb_out=mb_out,
        hit_rate=hit_rate,
        model_load_s=round(model_load_s, 3),
        adapter_load_s=round(adapter_load_s, 3),
        wall_all_s=[round(run.wall_s, 3) for run in runs],
        load_average=round(load_average, 2),
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


def _runs(
    engine: Engine, workload: Workload, prompts: Sequence[list[int]], registered: int, progress: TextIO
) -> list[Run]:
    """The measured runs, after a warm-up run that is not counted."""
    runs = []
    for number in range(workload.repeats + 1):
        runs.append(_measure(engine, workload, prompts, _chosen(workload, registered, number)))
        rate = workload.requests * workload.new_tokens / runs[-1].wall_s
        which = f"run {number} of {workload.repeats}" if number else "warm-up"
        progress.write(f"{which}: {runs[-1].wall_s:.2f} s, {rate:.1f} tokens/s\n")
    return runs[1:]


def _chosen(workload: Workload, registered: int, number: int) -> list[int]:
    if workload.popularity == "zipf":
        return zipf(workload.requests, registered, number)
    return cycle(workload.requests, workload.distinct) if workload.distinct else []


def _measure(engine: Engine, workload: Workload, prompts: Sequence[list[int]], chosen: list[int]) -> Run:
    sampling = SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True)
    requests = [
        Request(prompt_token_ids=ids, adapter=str(chosen[index]) if chosen else None, sampling=sampling)
        for index, ids in enumerate(prompts)
    ]
    before, started = engine.adapter_traffic, time.perf_counter()
    outputs = engine.generate(requests)
    return Run(time.perf_counter() - started, outputs, chosen, engine.adapter_traffic - before)


def lone_first_tokens(
    engine: Engine, ids: Sequence[int], adapters: Sequence[Path], *, cold: bool
) -> tuple[float, float | None]:
    """Seconds to the first token of a single request: with its adapter in the pool, and with checking and loading it.

    Uses the first adapters in turn. The second figure is None for the base model and without `cold`.
    """
    warm, loading = [], []
    for turn in range(LONE_REPEATS):
        index = turn % len(adapters) if adapters else None
        if index is not None and cold:
            engine.unload_adapter(str(index))
            started = time.perf_counter()
            engine.load_adapter(str(index), adapters[index])
            _first_token(engine, ids, index)
            loading.append(time.perf_counter() - started)
        else:
            _first_token(engine, ids, index)  # brings the adapter into the pool
        started = time.perf_counter()
        _first_token(engine, ids, index)
        warm.append(time.perf_counter() - started)
    return round(statistics.median(warm), 4), round(statistics.median(loading), 4) if loading else None


def _first_token(engine: Engine, ids: Sequence[int], adapter: int | None) -> None:
    name = None if adapter is None else str(adapter)
    engine.generate([Request(prompt_token_ids=ids, adapter=name, sampling=SamplingParams(max_tokens=1))])
