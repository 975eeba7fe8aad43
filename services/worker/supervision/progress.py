"""Ends a worker that makes no progress although it has work, so that another one gets its partitions."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from services.errors import ConfigError, RetryableError, ServiceError
from services.process import telemetry
from services.process.watchdog import Part, ProgressWatch

LOOKS_PER_LIMIT = 10
_log = telemetry.get_logger()


class StuckError(ServiceError):
    """A part of the process had work and made no progress."""


async def watch_progress(
    parts: Callable[[], Mapping[str, Part]], check_broker: Callable[[], Awaitable[None]], limit_s: float
) -> None:
    """Watch until cancelled; raises StuckError with the stuck parts, unless the broker is unreachable."""
    watch = ProgressWatch(limit_s)
    while True:
        await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
        if not (stuck := watch.stuck(parts(), time.monotonic())):
            continue
        try:
            await check_broker()
        except (RetryableError, ConfigError) as error:
            _log.warning("No progress: the broker is unreachable", action="broker_away", reason=str(error))
            watch.reset()
            continue
        telemetry.alarm(_log, "A part of the worker is stuck", action="stuck", parts=stuck)
        bound = f"{limit_s:g} s (LORAQ_PROGRESS_TIMEOUT_S)"
        raise StuckError(f"{', '.join(stuck)}: no progress for {bound} although there is work; the process exits")
