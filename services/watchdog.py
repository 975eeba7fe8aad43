"""Notices an event loop that no longer turns, from a thread beside it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LoopWatchdog:
    """Calls `on_blocked`, once and from its thread, when the running loop does not turn for `limit_s` seconds.

    It counts its own ticks without a beat, not time, so that a process that was suspended as a whole is spared.
    """

    TICKS = 10

    def __init__(self, limit_s: float, on_blocked: Callable[[], None]) -> None:
        self._tick_s = limit_s / self.TICKS
        self._on_blocked = on_blocked
        self._beats = 0
        self._done = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop."""
        beating = asyncio.create_task(self._beat(), name="loop beat")
        thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            await asyncio.sleep(self._tick_s / 2)

    def _watch(self) -> None:
        seen, silent_ticks = -1, 0
        while not self._done.wait(self._tick_s):
            beats = self._beats
            silent_ticks = 0 if beats != seen else silent_ticks + 1
            seen = beats
            if silent_ticks >= self.TICKS:
                self._on_blocked()
                return
