"""Detects a blocked event loop, from a separate thread, and parts of a process that have work but make no progress."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The current state of one part of the process; `progress` is any value that changes when it does some work."""

    has_work: bool
    progress: Hashable


class ProgressWatch:
    """Finds parts that have had work for `limit_s` seconds without progress. Pure: `now` is monotonic seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._unchanged: dict[str, tuple[Hashable, float]] = {}

    def stuck(self, parts: Mapping[str, Part], now: float) -> list[str]:
        """Check all parts; returns the names of those that are stuck."""
        working = {name: part.progress for name, part in parts.items() if part.has_work}
        self._unchanged = {name: self._since(name, progress, now) for name, progress in working.items()}
        return sorted(name for name, (_, since) in self._unchanged.items() if now - since >= self._limit_s)

    def _since(self, name: str, progress: Hashable, now: float) -> tuple[Hashable, float]:
        known = self._unchanged.get(name)
        return known if known is not None and known[0] == progress else (progress, now)

    def reset(self) -> None:
        """Start over, because something outside the process prevented progress."""
        self._unchanged.clear()


class LoopWatchdog:
    """Calls `on_blocked`, once and from its thread, when the running loop has been blocked for `limit_s` seconds.

    It counts its own ticks without a beat instead of time, so a process that was suspended as a whole does not count as
    blocked.
    """

    TICKS = 10

    def __init__(self, limit_s: float, on_blocked: Callable[[], None]) -> None:
        self._tick_s = limit_s / self.TICKS
        self._on_blocked = on_blocked
        self._beats = 0
        self._done = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running loop during the block."""
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
