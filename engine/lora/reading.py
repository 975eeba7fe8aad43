"""Reads adapter files in background threads."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

NUM_THREADS = 2
"""More than one, so that a hanging file system does not block all adapters."""


class Task(Protocol):
    """Work that has been started."""

    def done(self) -> bool:
        """True once it has finished or failed."""

    def result(self) -> None:
        """Raise what the work raised; may only be called once it is done."""


class Reader(Protocol):
    """Runs work in the background."""

    def start(self, work: Callable[[], None]) -> Task:
        """Start work; returns immediately."""

    def wait(self, timeout_s: float) -> None:
        """Block until some task is done, at most `timeout_s`."""

    def close(self) -> None:
        """Start no more work. Running work is not waited for; it keeps a reference to the memory it writes to."""


class ThreadReader:
    """Starts threads on demand. Each uses one torch thread, so as not to compete with the step's thread pool."""

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
