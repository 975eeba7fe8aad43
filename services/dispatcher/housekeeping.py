"""Periodic work: deletes finished rows after their retention time, and measures pending rows."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from services.dispatcher.outbox import Outbox
from services.dispatcher.wakeup import first_of
from services.errors import RetryableError
from services.process import telemetry

DELETE_EVERY_S = 3600.0
DELETE_BATCH = 1000
MEASURE_EVERY_S = 15.0
KINDS = ("event", "webhook")
_log = telemetry.get_logger()


async def every(interval_s: float, work: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Run `work` now and every `interval_s` seconds until `stop`; log a run that the database made fail."""
    while not stop.is_set():
        try:
            await work()
        except RetryableError as error:
            _log.warning("Housekeeping skipped", action="housekeeping_skipped", reason=str(error))
        await first_of(stop, timeout_s=interval_s)


async def delete_finished(outbox: Outbox, retention: timedelta) -> int:
    """Delete rows finished longer than `retention` ago, in small batches to keep locks short; returns the number."""
    deleted = 0
    while (batch := await outbox.delete_finished(retention, DELETE_BATCH)) > 0:
        deleted += batch
    if deleted:
        _log.info("Finished outbox rows deleted", action="outbox_deleted", rows=deleted)
    return deleted


async def measure(outbox: Outbox) -> None:
    """Set the gauges of pending rows."""
    backlog = {each.kind: each for each in await outbox.backlog()}
    for kind in KINDS:
        found = backlog.get(kind)
        telemetry.OUTBOX_PENDING.labels(kind=kind).set(found.rows if found else 0)
        telemetry.OUTBOX_OLDEST_SECONDS.labels(kind=kind).set(max(found.overdue_s, 0.0) if found else 0)
