"""The engine's benchmark: a workload that depends on its numbers alone, so that token ids can be compared too."""

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

from engine import Engine, EngineConfig, Output, Request, SamplingParams
from services.errors import InputError

FIRST_TOKEN_ID = 17
"""Ids below are special tokens in the model that published figures use."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of exactly `prompt_len` random tokens, each generating `new_tokens` greedily."""

    requests: int
    distinct: int
    prompt_len: int
    new_tokens: int
    repeats: int
    cold: bool


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Medians over the runs; times in seconds, memory in MB of 10^6 bytes. `wall_all_s` shows how much runs differ.

    `first_token_s` is the mean over requests, `first_token_max_s` the largest. Warm and cold are of one lone request.
    `load_average` is the machine's over the last minute of the runs: above `threads`, others have slowed them.
    """

    output_tokens_per_s: float
    wall_s: float
    first_token_s: float
    first_token_max_s: float
    peak_rss_mb: float
    requests: int
    distinct: int
    prompt_len: int
    new_tokens: int
    repeats: int
    dtype: str
    device: str
    threads: int
    adapter_mb: float
    model_load_s: float
    adapter_load_s: float
    wall_all_s: list[float]
    warm_first_token_s: float | None
    cold_first_token_s: float | None
    load_average: float
    machine: str


@dataclass(frozen=True, slots=True)
class _Run:
    wall_s: float
    outputs: list[Output]

    @property
    def first_token_s(self) -> list[float]:
        return [output.first_token_s or 0.0 for output in self.outputs]


def adapter_dirs(directory: Path | None, distinct: int) -> list[Path]:
    """The first `distinct` adapters of a directory by name; raises InputError when there are fewer."""
    if distinct == 0:
        return []
    if directory is None:
        raise InputError(f"--distinct {distinct} needs --adapters DIR, a directory of PEFT directories")
    found = sorted(path.parent for path in directory.glob("*/adapter_config.json"))
    if len(found) < distinct:
        raise InputError(f"{directory} holds {len(found)} adapters, fewer than --distinct {distinct}")
    return found[:distinct]


def prompt(index: int, length: int, vocabulary: int) -> list[int]:
    """Prompt of request `index`, the same in every run and on every machine."""
    rng = random.Random(f"p7-{index}")
    return [rng.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(length)]


def run_engine(config: EngineConfig, workload: Workload, adapters: Sequence[Path], progress: TextIO) -> EngineReport:
    """Load everything, warm up once, measure `repeats` runs and report."""
    started = time.perf_counter()
    engine = Engine(config)
    model_load_s = time.perf_counter() - started
    infos = [engine.load_adapter(str(index), path) for index, path in enumerate(adapters)]
    adapter_load_s = time.perf_counter() - started - model_load_s
    requests = _requests(workload, engine.model_config.vocab_size)
    _measure(engine, requests)
    runs = []
    for number in range(workload.repeats):
        runs.append(_measure(engine, requests))
        rate = workload.requests * workload.new_tokens / runs[-1].wall_s
        progress.write(f"run {number + 1} of {workload.repeats}: {runs[-1].wall_s:.2f} s, {rate:.1f} tokens/s\n")
    warm, cold = _lone_first_tokens(engine, requests[0], adapters) if workload.cold else (None, None)
    wall_s = statistics.median(run.wall_s for run in runs)
    return EngineReport(
        output_tokens_per_s=round(workload.requests * workload.new_tokens / wall_s, 2),
        wall_s=round(wall_s, 6),
        first_token_s=round(statistics.median(statistics.mean(run.first_token_s) for run in runs), 4),
        first_token_max_s=round(statistics.median(max(run.first_token_s) for run in runs), 4),
        peak_rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
        requests=workload.requests,
        distinct=workload.distinct,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        repeats=workload.repeats,
        dtype=config.dtype,
        device=config.device,
        threads=config.num_threads,
        adapter_mb=round(sum(info.num_bytes for info in infos) / 1e6, 1),
        model_load_s=round(model_load_s, 3),
        adapter_load_s=round(adapter_load_s, 3),
        wall_all_s=[round(run.wall_s, 3) for run in runs],
        warm_first_token_s=warm,
        cold_first_token_s=cold,
        load_average=round(os.getloadavg()[0], 2),
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


def _requests(workload: Workload, vocabulary: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=prompt(index, workload.prompt_len, vocabulary),
            adapter=str(index % workload.distinct) if workload.distinct else None,
            sampling=sampling,
        )
        for index in range(workload.requests)
    ]


def _measure(engine: Engine, requests: Sequence[Request]) -> _Run:
    started = time.perf_counter()
    outputs = engine.generate(requests)
    return _Run(time.perf_counter() - started, outputs)


def _lone_first_tokens(engine: Engine, request: Request, adapters: Sequence[Path]) -> tuple[float, float | None]:
    """Seconds to the first token of one request: its adapter loaded, and loaded for it (None when base only)."""
    lone = Request(
        prompt_token_ids=request.prompt_token_ids, adapter=request.adapter, sampling=SamplingParams(max_tokens=1)
    )
    warm = _measure(engine, [lone]).wall_s
    if not adapters:
        return round(warm, 4), None
    engine.unload_adapter("0")
    started = time.perf_counter()
    engine.load_adapter("0", adapters[0])
    engine.generate([lone])
    return round(warm, 4), round(time.perf_counter() - started, 4)
