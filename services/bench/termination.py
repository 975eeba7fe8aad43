"""SIGTERM ends a benchmark as Ctrl-C does, so that it removes what it created."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


async def cancelled_by_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; SIGTERM cancels it, and a second one does not interrupt its cleanup. Raises CancelledError."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def cancel() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    return await task


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in the block; a second one does not interrupt its cleanup."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
