"""Retries database work until it is done, with the partitions paused meanwhile."""

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
    """Retries work that fails because of the database; calls `on_change` with whether anything is being retried."""

    def __init__(self, health: Health, on_change: Callable[[bool], None]) -> None:
        self._health = health
        self._on_change = on_change
        self._failing = 0

    async def retry_until_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work` until it does not raise RetryableError; other errors propagate."""
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
        _log.warning("Database work is retried", action="database_retry", reason=str(error), attempt=attempt + 1)
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
    """Call `work` on a batch; if it fails, on its halves, so that one bad item does not affect the others.

    `alone` returns the result of an item that fails on its own. A ConfigError is not caused by an item and propagates.
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
