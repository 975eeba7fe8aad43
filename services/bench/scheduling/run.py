"""Runs one queue of jobs on the real engine under several policies in turn, each starting from an empty pool."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.lora.reading import ThreadReader
from schemas.common import Lane
from services.bench.engine.adapters import zipf
from services.bench.engine.run import prompt
from services.bench.scheduling.recording import Recording, TimedReader, TurnLog
from services.bench.scheduling.slow_store import SlowReader, Throttle
from services.worker.queue.backlog import Backlog, Demand, EngineView, LaneRules, Waiting

SLACK = 4
"""The engine gets a quarter more sequences than a batch, so that a next one is ready as soon as one ends."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy's name and its bound on overtaking in tokens; 0 means first come, first served without lookahead."""

    name: str
    overtake_tokens: float

    @property
    def looks_ahead(self) -> bool:
        """Whether the engine is notified which adapters the queue needs."""
        return self.overtake_tokens > 0


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of `jobs` whose adapters follow Zipf's law; the policy knows at most `window` of them at once."""

    jobs: int
    window: int
    prompt_len: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """Measurements of one policy. `passed_tokens` is the largest number of tokens that passed any job.

    Waits are seconds from the start of the run to a job's admission, so they grow with its position in the queue.
    """

    policy: str
    wall_s: float
    tokens_per_s: float
    loads: int
    mb_loaded: float
    rows_per_step: float
    adapters_per_step: float
    adapter_mb_per_step: float
    passed_tokens: float
    wait_p50_s: float
    wait_p99_s: float
    recording: Recording


class _Reads:
    """Mean size of an adapter file, which a throttled reader charges for each read."""

    def __init__(self) -> None:
        self.num_bytes = 0


def open_engine(
    config: EngineConfig, adapters: Sequence[Path], throttle: Throttle | None
) -> tuple[Engine, TimedReader]:
    """An engine with all adapters registered under their numbers and none loaded, and the reader of their files."""
    reads = _Reads()
    reader = TimedReader(ThreadReader() if throttle is None else SlowReader(throttle, lambda: reads.num_bytes))
    engine = Engine(config, reader=reader)
    for number, path in enumerate(adapters):
        engine.admit_adapter(str(number), engine.check_adapter(path))
    reads.num_bytes = round(statistics.mean(info.num_bytes for info in engine.adapters.values()))
    return engine, reader


def serve(engine: Engine, reader: TimedReader, queue: Queue, policy: Policy, seed: int) -> Served:
    """Serve the whole queue under one policy."""
    for name in engine.resident_adapters:
        engine.evict_adapter(name)
    engine.expect(())
    chosen = zipf(queue.jobs, len(engine.adapters), seed)
    feeder = _Feeder(engine, queue, policy, chosen)
    num_reads = len(reader.seconds)
    before, traffic, began = engine.stats, engine.adapter_traffic, time.perf_counter()
    feeder.run()
    wall_s = time.perf_counter() - began
    stats, loads = engine.stats - before, engine.adapter_traffic - traffic
    waits = sorted(feeder.waits)
    return Served(
        policy=policy.name,
        wall_s=round(wall_s, 3),
        tokens_per_s=round(queue.jobs * queue.new_tokens / wall_s, 1),
        loads=loads.loads,
        mb_loaded=round(loads.bytes_in / 1e6, 1),
        rows_per_step=round(stats.decode_tokens / stats.steps, 2),
        adapters_per_step=round(stats.adapters / stats.steps, 2),
        adapter_mb_per_step=round(stats.adapter_bytes / stats.steps / 1e6, 2),
        passed_tokens=feeder.most_passed,
        wait_p50_s=round(waits[len(waits) // 2], 3),
        wait_p99_s=round(waits[len(waits) * 99 // 100], 3),
        recording=Recording(tuple(chosen), tuple(feeder.log.turns), tuple(reader.seconds[num_reads:])),
    )


class _Feeder:
    """Feeds the engine from the backlog, as a worker does."""

    def __init__(self, engine: Engine, queue: Queue, policy: Policy, chosen: Sequence[int]) -> None:
        self._engine, self._queue, self._policy, self._chosen = engine, queue, policy, chosen
        rules = LaneRules(overtake_tokens=policy.overtake_tokens)
        self._backlog = Backlog[int](queue.window, {Lane.STANDARD: rules})
        for number in range(len(engine.adapters)):
            self._backlog.open(str(number))
        self._inside: dict[str, Waiting[int]] = {}
        self._capacity = engine.config.max_batch_size + max(1, engine.config.max_batch_size // SLACK)
        self.log = TurnLog(engine)
        self._began = time.perf_counter()
        self._admitted: list[int] = []
        self.waits: list[float] = []

    def run(self) -> None:
        arrivals = iter(range(self._queue.jobs))
        for _ in self._turns(arrivals):
            for output in self._engine.step():
                assert output.error is None, output.error
                self._backlog.correct(self._inside.pop(output.request_id), self._tokens)
            self.log.end_turn()

    def _turns(self, arrivals: Iterator[int]) -> Iterator[None]:
        while True:
            self._fill(arrivals)
            self._hand_over()
            if not self._inside:
                return
            yield

    @property
    def _tokens(self) -> int:
        return self._queue.prompt_len + self._queue.new_tokens

    def _fill(self, arrivals: Iterator[int]) -> None:
        while len(self._backlog) < self._queue.window and (number := next(arrivals, None)) is not None:
            demand = Demand(Lane.STANDARD, "tenant", str(self._chosen[number]), self._tokens)
            self._backlog.add(number, demand, time.perf_counter())

    def _hand_over(self) -> None:
        room = self._capacity - len(self._inside)
        if room <= 0:
            return
        running: dict[str, int] = {}
        for waiting in self._inside.values():
            running[waiting.demand.group] = running.get(waiting.demand.group, 0) + 1
        view = EngineView(running, self._engine.resident_adapters)
        for waiting in self._backlog.pop(room, view):
            self._add(waiting)
        if self._policy.looks_ahead:
            self._engine.expect(self._backlog.wanted())

    def _add(self, waiting: Waiting[int]) -> None:
        number = waiting.job
        sampling = SamplingParams(max_tokens=self._queue.new_tokens, ignore_eos=True)
        ids = prompt(number, self._queue.prompt_len, self._engine.model_config.vocab_size)
        request = Request(prompt_token_ids=ids, adapter=waiting.demand.group, sampling=sampling)
        self._inside[self._engine.add(request)] = waiting
        self._admitted.append(number)
        self.waits.append(time.perf_counter() - self._began)

    @property
    def most_passed(self) -> float:
        """The largest number of tokens of later arrivals admitted before a job, from the order of admission alone."""
        place = {number: index for index, number in enumerate(self._admitted)}
        passed = (sum(other > number for other in self._admitted[: place[number]]) for number in place)
        return max(passed) * self._tokens


def measure(
    engine: Engine,
    reader: TimedReader,
    queue: Queue,
    policies: Sequence[Policy],
    seeds: Sequence[int],
    progress: TextIO,
) -> list[list[Served]]:
    """One round per seed: every policy serves the same queue, and the order of the policies rotates between rounds."""
    rounds = []
    for number, seed in enumerate(seeds):
        order = [*policies[number % len(policies) :], *policies[: number % len(policies)]]
        served = {policy.name: _reported(serve(engine, reader, queue, policy, seed), progress) for policy in order}
        rounds.append([served[policy.name] for policy in policies])
    return rounds


def _reported(served: Served, progress: TextIO) -> Served:
    progress.write(
        f"{served.policy}: {served.tokens_per_s} tokens/s, {served.loads} loads, {served.mb_loaded} MB,"
        f" {served.adapters_per_step} adapters a step, passed by {served.passed_tokens:g}\n"
    )
    return served


def ratios(rounds: Sequence[Sequence[Served]]) -> dict[str, dict[str, float]]:
    """Median over the rounds of each policy's measurements divided by the first policy's in the same round."""
    measures: dict[str, Callable[[Served], float]] = {
        "loads": lambda served: served.loads,
        "mb_loaded": lambda served: served.mb_loaded,
        "adapters_per_row": lambda served: served.adapters_per_step / served.rows_per_step,
        "adapters_per_step": lambda served: served.adapters_per_step,
        "tokens_per_s": lambda served: served.tokens_per_s,
    }
    return {
        rounds[0][index].policy: {
            name: round(statistics.median(of(each[index]) / of(each[0]) for each in rounds), 3)
            for name, of in measures.items()
        }
        for index in range(1, len(rounds[0]))
    }
