"""Tokens a second of the engine: the base model, adapters of mixed ranks, and a cold adapter beside them."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.types import Request, SamplingParams

FIRST_TOKEN_ID = 3
WARM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """Requests of `context` prompt tokens, request i with adapter i modulo `adapters`; 0 is the base model."""

    requests: int
    adapters: int
    context: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.requests} requests, {self.adapters} adapters, context {self.context}"


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all prompts, and over decode steps with every request in each of them."""

    case: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Overlap:
    """What adapters that come from the host tier cost those that run: seconds of a step without and with transfers.

    `step_cost` is the share of the token rate that is lost; `arrival_s` from the request to the adapter's first token.
    """

    adapter_bytes: int
    quiet_step_s: float
    busy_step_s: float
    step_cost: float
    arrival_s: float


def requests_of(case: Case, vocabulary: int, new_tokens: int) -> list[Request]:
    """Greedy, of random prompts that are the same in every run."""
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=[rng.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(case.context)],
            adapter=str(index % case.adapters) if case.adapters else None,
            sampling=sampling,
        )
        for index in range(case.requests)
    ]


def measure_case(engine: Engine, case: Case, decode_steps: int, wait: Callable[[], None]) -> Speed:
    """Compute all prompts, then time decode steps. `wait` holds the host until the device is done."""
    requests = requests_of(case, engine.model_config.vocab_size, decode_steps + WARM_STEPS + case.requests + 8)
    ids = [engine.add(request) for request in requests]
    started = time.perf_counter()
    while engine.num_uncomputed:
        engine.step()
    wait()
    prefill_s = time.perf_counter() - started
    decode_s = time_steps(engine, WARM_STEPS, decode_steps)
    for request_id in ids:
        engine.cancel(request_id)
    return Speed(case.name, case.requests * case.context / prefill_s, case.requests / decode_s)


def time_steps(engine: Engine, warm: int, count: int) -> float:
    """Mean seconds of a step; every step ends when its tokens are on the host."""
    times = []
    for _ in range(warm + count):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.mean(times[warm:])


def measure_overlap(
    engine: Engine, hot: Case, cold: Sequence[str], steps: int, wait: Callable[[], None], trace: Path | None = None
) -> Overlap:
    """Decode of `hot` alone, then while `cold` adapters come in one after the other."""
    budget = (steps + 8) * (len(cold) + 2) + hot.requests + 64
    ids = [engine.add(request) for request in requests_of(hot, engine.model_config.vocab_size, budget)]
    while engine.num_uncomputed:
        engine.step()
    for name in cold:
        engine.evict_adapter(name)
    quiet = time_steps(engine, WARM_STEPS, steps)
    busy: list[float] = []
    arrivals: list[float] = []
    with _profile(trace) as profile:
        for name in cold:
            _bring_in(engine, name, steps, busy, arrivals)
        wait()
    if profile is not None and trace is not None:
        profile.export_chrome_trace(str(trace))
    for request_id in ids:
        engine.cancel(request_id)
    busy_s = statistics.mean(busy)
    return Overlap(
        adapter_bytes=max(engine.adapters[name].num_bytes for name in cold),
        quiet_step_s=quiet,
        busy_step_s=busy_s,
        step_cost=1 - quiet / busy_s,
        arrival_s=statistics.median(arrivals),
    )


def _profile(trace: Path | None) -> Any:
    if trace is None:
        return nullcontext()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities)


def _bring_in(engine: Engine, name: str, steps: int, busy: list[float], arrivals: list[float]) -> None:
    """One token by a cold adapter, while the others decode; the step that computes its prompt is not their loss."""
    asked = engine.add(Request(prompt_token_ids=[FIRST_TOKEN_ID], adapter=name, sampling=SamplingParams(max_tokens=1)))
    began = time.perf_counter()
    is_there = False
    for _ in range(steps):
        started = time.perf_counter()
        finished = engine.step()
        now = time.perf_counter()
        if any(output.request_id == asked for output in finished):
            arrivals.append(now - began)
            is_there = True
        else:
            busy.append(now - started)
    while not is_there:
        is_there = any(output.request_id == asked for output in engine.step())
        if is_there:
            arrivals.append(time.perf_counter() - began)


def load_adapters(engine: Engine, directories: Sequence[Path], count: int) -> None:
    """Adapters "0" to count - 1, each with pages of its own, from the directories in turn."""
    for index in range(count):
        engine.load_adapter(str(index), directories[index % len(directories)])
