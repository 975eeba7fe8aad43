"""Records a run in enough detail to calibrate a simulator and to compare the simulator with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine import Engine, StepStats
from engine.lora.reading import Reader, Task


class Turn(NamedTuple):
    """One turn of the loop around the engine: refill the backlog, hand jobs over, compute a step.

    `adapter_bytes` is the adapter weights that the step read, `load_bytes` the size of the loads that began. A turn
    computes nothing if all adapters of its sequences are still loading.
    """

    prefill_tokens: int
    decode_rows: int
    adapters: int
    adapter_bytes: int
    load_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """`chosen` is the number of each job's adapter; `read_s` is the duration of each read of an adapter's file."""

    chosen: tuple[int, ...]
    turns: tuple[Turn, ...]
    read_s: tuple[float, ...]


class TurnLog:
    """Records the turns of one run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stats, self._bytes_in = engine.stats, engine.adapter_traffic.bytes_in
        self._ended = time.perf_counter()
        self.turns: list[Turn] = []

    def end_turn(self) -> None:
        """Record the turn that ends now; the next one begins."""
        stats, bytes_in, ended = self._engine.stats, self._engine.adapter_traffic.bytes_in, time.perf_counter()
        step: StepStats = stats - self._stats
        self.turns.append(
            Turn(
                step.prefill_tokens,
                step.decode_tokens,
                step.adapters,
                step.adapter_bytes,
                bytes_in - self._bytes_in,
                round(ended - self._ended, 6),
            )
        )
        self._stats, self._bytes_in, self._ended = stats, bytes_in, ended


class TimedReader:
    """A reader that records how long each read took, excluding waits for a thread or for a throttled link."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.seconds: list[float] = []

    def start(self, work: Callable[[], None]) -> Task:
        """See `Reader.start`."""
        return self._reader.start(lambda: self._timed(work))

    def _timed(self, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        self.seconds.append(round(time.perf_counter() - began, 6))

    def wait(self, timeout_s: float) -> None:
        """See `Reader.wait`."""
        self._reader.wait(timeout_s)

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()
