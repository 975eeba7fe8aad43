"""Database work that must not be lost: tried again until it is done, with the partitions paused meanwhile."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.errors import ConfigError, PermanentError, RetryableError
from services.process import telemetry
from services.process.lifecycle import Health

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

DELAYS_S = (0.1, 0.3, 1.0, 2.0, 5.0)
_log = telemetry.get_logger()


class Persistence:
    """Repeats what fails for the database's sake. `on_change` hears whether anything is being repeated."""

    def __init__(self, health: Health, on_change: Callable[[bool], None]) -> None:
        self._health = health
        self._on_change = on_change
        self._failing = 0

    async def insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, again and again while it raises RetryableError; other errors pass through."""
        attempt = 0
        try:
            while True:
                try:
                    return await work()
                except RetryableError as error:
                    self._failed(error, attempt)
                    attempt += 1
                    delay_s = DELAYS_S[min(attempt, len(DELAYS_S)) - 1]
                    await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
        finally:
            if attempt:
                self._recovered()

    def _failed(self, error: RetryableError, attempt: int) -> None:
        _log.warning("Database work repeated", action="database_retry", reason=str(error), attempt=attempt + 1)
        if attempt == 0:
            self._failing += 1
        self._health.set("database", str(error))
        self._on_change(True)

    def _recovered(self) -> None:
        self._failing -= 1
        if not self._failing:
            self._health.set("database", None)
            self._on_change(False)


async def isolate(
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
    alone: Callable[[Item, PermanentError], Awaitable[Result]],
) -> list[Result]:
    """Do `work` on a batch; if the batch as a whole cannot be done, on its halves, so that one bad item harms no other.

    `alone` says what becomes of an item that cannot be done even by itself. A ConfigError is no item's fault.
    """
    try:
        return list(await work(items))
    except ConfigError:
        raise
    except PermanentError as error:
        if len(items) == 1:
            return [await alone(items[0], error)]
    middle = len(items) // 2
    return await isolate(items[:middle], work, alone) + await isolate(items[middle:], work, alone)
