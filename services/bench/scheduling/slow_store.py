"""A reader that simulates a remote store: each read costs a fixed latency plus its bytes at a given bandwidth."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.lora.reading import Task, ThreadReader


@dataclass(frozen=True, slots=True)
class Throttle:
    """A simulated link: seconds until the first byte, and bytes per second for all reads together."""

    latency_s: float
    bytes_per_s: float


class SlowReader:
    """A reader whose threads share one throttled link, which every adapter crosses first."""

    def __init__(self, throttle: Throttle, bytes_per_read: Callable[[], int]) -> None:
        self._throttle = throttle
        self._bytes_per_read = bytes_per_read
        self._reader = ThreadReader()
        self._link = threading.Lock()
        self._ended = threading.Event()

    def start(self, work: Callable[[], None]) -> Task:
        """See `Reader.start`."""
        num_bytes = self._bytes_per_read()
        return self._reader.start(lambda: self._fetch(work, num_bytes))

    def _fetch(self, work: Callable[[], None], num_bytes: int) -> None:
        self._ended.wait(self._throttle.latency_s)
        with self._link:
            began = time.perf_counter()
            work()
            self._ended.wait(max(0.0, num_bytes / self._throttle.bytes_per_s - (time.perf_counter() - began)))

    def wait(self, timeout_s: float) -> None:
        """See `Reader.wait`."""
        self._reader.wait(timeout_s)

    def close(self) -> None:
        """See `Reader.close`."""
        self._ended.set()
        self._reader.close()
