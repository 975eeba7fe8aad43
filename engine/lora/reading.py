"""Reading adapters from their files in threads beside the one that steps."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

NUM_THREADS = 2
"""So that one file system that hangs does not hold up every adapter."""


class Task(Protocol):
    """Work that was begun."""

    def done(self) -> bool:
        """True once it has ended, well or not."""

    def result(self) -> None:
        """Raise what it raised; only called when it has ended."""


class Reader(Protocol):
    """Who does the work."""

    def start(self, work: Callable[[], None]) -> Task:
        """Begin; returns at once."""

    def wait(self, timeout_s: float) -> None:
        """Hold the caller until some task ends, or no longer than that."""

    def close(self) -> None:
        """Begin nothing more. What runs keeps the memory that it writes to, and is not waited for."""


class ThreadReader:
    """Threads that are started when first needed. Each uses one core: a team of its own would disturb the step's."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "adapters", initializer=torch.set_num_threads, initargs=(1,))
        self._open: set[Future[None]] = set()

    def start(self, work: Callable[[], None]) -> Task:
        """See `Reader.start`."""
        self._open = {task for task in self._open if not task.done()}
        task = self._threads.submit(work)
        self._open.add(task)
        return task

    def wait(self, timeout_s: float) -> None:
        """See `Reader.wait`."""
        wait(self._open, timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """See `Reader.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
