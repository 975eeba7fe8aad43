"""Ends a worker that no longer moves although it has work, so that another takes its partitions."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from services.errors import ConfigError, RetryableError, ServiceError
from services.process import telemetry
from services.process.watchdog import Part, ProgressWatch

LOOKS_PER_LIMIT = 10
_log = telemetry.get_logger()


class StuckError(ServiceError):
    """A part of the process had work and did none of it."""


async def watch_progress(
    parts: Callable[[], Mapping[str, Part]], check_broker: Callable[[], Awaitable[None]], limit_s: float
) -> None:
    """Look for ever; raises StuckError naming what stands still. While the broker is away nothing is to blame."""
    watch = ProgressWatch(limit_s)
    while True:
        await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
        if not (stuck := watch.stuck(parts(), time.monotonic())):
            continue
        try:
            await check_broker()
        except (RetryableError, ConfigError) as error:
            _log.warning("Nothing moves: the broker is away", action="broker_away", reason=str(error))
            watch.excuse()
            continue
        telemetry.alarm(_log, "A part of the worker is stuck", action="stuck", parts=stuck)
        bound = f"{limit_s:g} s (LORAQ_PROGRESS_TIMEOUT_S)"
        raise StuckError(f"{', '.join(stuck)}: had work and did none of it for {bound}; the process ends")
