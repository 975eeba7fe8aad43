"""Tokens per second of the engine: the base model, adapters of mixed ranks, and with a cold adapter loading."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.engine import Engine
from engine.types import Request, SamplingParams

FIRST_TOKEN_ID = 3
WARM_STEPS = 3
WARM_CONTEXT = 512
TRACED_STEPS = 6


@dataclass(frozen=True)
class Case:
    """Requests of `context` prompt tokens; request i uses adapter i modulo `adapters`, 0 adapters: the base model."""

    requests: int
    adapters: int
    context: int

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.requests} requests, {self.adapters} adapters, context {self.context}"


@dataclass(frozen=True)
class Speed:
    """Tokens per second over all prompts, and over decode steps that each contain every request."""

    case: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Overlap:
    """The cost of loading adapters from the host tier to running requests: seconds per step without and with transfers.

    `step_cost`: the lost share of the token rate; `arrival_s`: from the request to the cold adapter's first token.
    """

    adapter_bytes: int
    quiet_step_s: float
    busy_step_s: float
    step_cost: float
    arrival_s: float


def requests_of(case: Case, vocabulary: int, new_tokens: int) -> list[Request]:
    """Greedy requests with random prompts, the same in every run."""
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
    """Compute all prompts, then time decode steps. `wait` blocks until the device is done."""
    _warm_up(engine, case)
    wait()
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


def _warm_up(engine: Engine, case: Case) -> None:
    """Run a short copy of the case, which compiles kernels, initializes libraries and loads adapters."""
    short = replace(case, context=min(case.context, WARM_CONTEXT))
    with _decoding(engine, short, case.requests + 8):
        time_steps(engine, 0, 1)


def time_steps(engine: Engine, warm: int, count: int) -> float:
    """Mean seconds per step; every step ends when its tokens are on the host."""
    times = []
    for _ in range(warm + count):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.mean(times[warm:])


def measure_overlap(engine: Engine, hot: Case, cold: Sequence[str], steps: int, wait: Callable[[], None]) -> Overlap:
    """Time decode steps of `hot` alone, then while the `cold` adapters load from the host tier one after the other."""
    budget = (steps + 16) * (2 * len(cold) + 2) + hot.requests + 64
    with _decoding(engine, hot, budget):
        for name in cold:  # loads the files into the host tier and compiles the kernels
            _load_cold(engine, name)
        for name in cold:
            engine.evict_adapter(name)
        quiet = time_steps(engine, WARM_STEPS, steps)
        arrivals = [_load_cold(engine, name) for name in cold]
        wait()
    busy = statistics.mean(seconds for arrival in arrivals for seconds in arrival.busy_steps_s)
    return Overlap(
        adapter_bytes=max(engine.adapters[name].num_bytes for name in cold),
        quiet_step_s=quiet,
        busy_step_s=busy,
        step_cost=1 - quiet / busy,
        arrival_s=statistics.median(arrival.seconds for arrival in arrivals),
    )


@contextmanager
def _decoding(engine: Engine, case: Case, new_tokens: int) -> Iterator[None]:
    """Compute all prompts of the case; in the block every step generates a token for each request."""
    engine.generate(
        [_one_token_of(name) for name in adapter_names(case.adapters)]
    )  # so that no request waits for its adapter
    ids = [engine.add(request) for request in requests_of(case, engine.model_config.vocab_size, new_tokens)]
    try:
        while engine.num_uncomputed:
            engine.step()
        yield
    finally:
        ran_throughout = [engine.cancel(request_id) for request_id in ids]
    assert all(ran_throughout), f"{case.name}: a request reached its limit of {new_tokens} tokens while being measured"


@dataclass(frozen=True)
class _Arrival:
    """The load of a cold adapter: seconds from its request to its first token, and of each step in between.

    The step that computes the cold request's own prompt is excluded.
    """

    seconds: float
    busy_steps_s: list[float]


def _load_cold(engine: Engine, name: str) -> _Arrival:
    """Generate one token with a cold adapter while the other requests decode."""
    request_id = engine.add(_one_token_of(name))
    began = time.perf_counter()
    busy: list[float] = []
    while True:
        started = time.perf_counter()
        finished = engine.step()
        now = time.perf_counter()
        if any(output.request_id == request_id for output in finished):
            return _Arrival(now - began, busy)
        busy.append(now - started)


def _one_token_of(name: str) -> Request:
    return Request(prompt_token_ids=[FIRST_TOKEN_ID], adapter=name, sampling=SamplingParams(max_tokens=1))


def trace_arrival(engine: Engine, hot: Case, cold: str, wait: Callable[[], None], trace: Path) -> None:
    """Profile steps of `hot` during which a cold adapter loads: a Chrome trace, gzipped if the name ends in .gz."""
    with _decoding(engine, hot, 8 * (WARM_STEPS + TRACED_STEPS) + hot.requests):
        _load_cold(engine, cold)
        engine.evict_adapter(cold)
        time_steps(engine, 0, WARM_STEPS)
        with torch.profiler.profile(activities=_activities(), acc_events=True) as profile:
            request_id = engine.add(_one_token_of(cold))
            time_steps(engine, 0, TRACED_STEPS)
            wait()
        engine.cancel(request_id)
    profile.export_chrome_trace(str(trace))


def _activities() -> list[torch.profiler.ProfilerActivity]:
    known = torch.profiler.ProfilerActivity
    return [known.CPU, known.CUDA] if torch.cuda.is_available() else [known.CPU]


def load_adapters(engine: Engine, directories: Sequence[Path], names: Sequence[str]) -> None:
    """Register names for the directories in turn; each directory is read and hashed once, each name has its own pages.

    The pages are filled when a request first needs them.
    """
    checked = [engine.check_adapter(directory) for directory in directories]
    for index, name in enumerate(names):
        engine.admit_adapter(name, checked[index % len(checked)])


def adapter_names(count: int) -> list[str]:
    """The adapter names that the requests of a case use."""
    return [str(index) for index in range(count)]
