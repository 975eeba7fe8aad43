"""Notices what no longer moves: the event loop, from a thread beside it, and any part of a process that has work."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the process as it is now; `moved` is anything that differs once it did some of its work."""

    has_work: bool
    moved: Hashable


class ProgressWatch:
    """Which parts have had work for `limit_s` seconds on end without moving. Pure: `now` is monotonic seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._still: dict[str, tuple[Hashable, float]] = {}

    def stuck(self, parts: Mapping[str, Part], now: float) -> list[str]:
        """Look at all parts; returns the names of those that are stuck."""
        working = {name: part.moved for name, part in parts.items() if part.has_work}
        self._still = {name: self._since(name, moved, now) for name, moved in working.items()}
        return sorted(name for name, (_, since) in self._still.items() if now - since >= self._limit_s)

    def _since(self, name: str, moved: Hashable, now: float) -> tuple[Hashable, float]:
        known = self._still.get(name)
        return known if known is not None and known[0] == moved else (moved, now)

    def excuse(self) -> None:
        """What kept everything still was no part's fault: begin anew."""
        self._still.clear()


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
