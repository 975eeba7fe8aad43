"""Tokens a second of the engine: the base model, adapters of mixed ranks, and a cold adapter beside them."""

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
    """A short copy of the case: kernels are compiled, libraries started and adapters brought in before it is timed."""
    short = replace(case, context=min(case.context, WARM_CONTEXT))
    with _decoding(engine, short, case.requests + 8):
        time_steps(engine, 0, 1)


def time_steps(engine: Engine, warm: int, count: int) -> float:
    """Mean seconds of a step; every step ends when its tokens are on the host."""
    times = []
    for _ in range(warm + count):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.mean(times[warm:])


def measure_overlap(engine: Engine, hot: Case, cold: Sequence[str], steps: int, wait: Callable[[], None]) -> Overlap:
    """Decode of `hot` alone, then while `cold` adapters come in from the host tier one after the other."""
    budget = (steps + 16) * (2 * len(cold) + 2) + hot.requests + 64
    with _decoding(engine, hot, budget):
        for name in cold:  # from their files into the host tier, and compiling what the measured ones use
            _bring_in(engine, name)
        for name in cold:
            engine.evict_adapter(name)
        quiet = time_steps(engine, WARM_STEPS, steps)
        arrivals = [_bring_in(engine, name) for name in cold]
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
    """All prompts of the case are computed, and every step makes a token of each request until the end."""
    engine.generate([_one_token_of(name) for name in numbered(case.adapters)])  # so that none waits while others decode
    ids = [engine.add(request) for request in requests_of(case, engine.model_config.vocab_size, new_tokens)]
    try:
        while engine.num_uncomputed:
            engine.step()
        yield
    finally:
        ran_throughout = [engine.cancel(request_id) for request_id in ids]
    assert all(ran_throughout), f"{new_tokens} tokens a request did not last; the steps were not those of {case.name}"


@dataclass(frozen=True)
class _Arrival:
    """Of a cold adapter: seconds from its request to its first token, and those of each step meanwhile.

    The step that computes its prompt is not the others' loss.
    """

    seconds: float
    busy_steps_s: list[float]


def _bring_in(engine: Engine, name: str) -> _Arrival:
    """One token by a cold adapter, while the others decode."""
    asked = engine.add(_one_token_of(name))
    began = time.perf_counter()
    busy: list[float] = []
    while True:
        started = time.perf_counter()
        finished = engine.step()
        now = time.perf_counter()
        if any(output.request_id == asked for output in finished):
            return _Arrival(now - began, busy)
        busy.append(now - started)


def _one_token_of(name: str) -> Request:
    return Request(prompt_token_ids=[FIRST_TOKEN_ID], adapter=name, sampling=SamplingParams(max_tokens=1))


def trace_arrival(engine: Engine, hot: Case, cold: str, wait: Callable[[], None], trace: Path) -> None:
    """Profile some steps of `hot` in which a cold adapter comes in: a Chrome trace, gzipped if it is named .gz."""
    with _decoding(engine, hot, 8 * (WARM_STEPS + TRACED_STEPS) + hot.requests):
        _bring_in(engine, cold)
        engine.evict_adapter(cold)
        time_steps(engine, 0, WARM_STEPS)
        with torch.profiler.profile(activities=_activities(), acc_events=True) as profile:
            asked = engine.add(_one_token_of(cold))
            time_steps(engine, 0, TRACED_STEPS)
            wait()
        engine.cancel(asked)
    profile.export_chrome_trace(str(trace))


def _activities() -> list[torch.profiler.ProfilerActivity]:
    known = torch.profiler.ProfilerActivity
    return [known.CPU, known.CUDA] if torch.cuda.is_available() else [known.CPU]


def load_adapters(engine: Engine, directories: Sequence[Path], names: Sequence[str]) -> None:
    """From the directories in turn, each of which is read and hashed once; every name has pages of its own.

    They are filled once a request needs them.
    """
    checked = [engine.check_adapter(directory) for directory in directories]
    for index, name in enumerate(names):
        engine.admit_adapter(name, checked[index % len(checked)])


def numbered(count: int) -> list[str]:
    """The names that the requests of a case use."""
    return [str(index) for index in range(count)]
