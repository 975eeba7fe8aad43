"""Reports the worker's load and adapters to the database once a second, and reads the load of the others."""

import asyncio
import time
from collections.abc import Callable, Mapping

from services.errors import ServiceError
from services.postgres.pool import Pool, transaction
from services.process import telemetry
from services.routing import status
from services.routing.status import Report, Tier

REPORT_EVERY_S = 1.0
REPLACE_EVERY_S = 30.0
"""The table is unlogged: what a crash of the server removed is written again."""
LIST_DISK_EVERY_S = 5.0
_log = telemetry.get_logger()


class Reporter:
    """One loop. `collect` gets the digests on disk and returns the report; a report that fails is not retried."""

    def __init__(
        self,
        pool: Pool,
        pool_name: str,
        worker: str,
        collect: Callable[[frozenset[str]], Report],
        list_disk: Callable[[], frozenset[str]],
    ) -> None:
        self._pool = pool
        self._pool_name = pool_name
        self._worker = worker
        self._collect = collect
        self._list_disk = list_disk
        self._on_disk: frozenset[str] = frozenset()
        self._listed_at = self._replaced_at = float("-inf")
        self._reported: dict[str, Tier] = {}
        self._failing = False
        self._one_at_a_time = asyncio.Lock()
        self._withdrawn = False
        self.loads_of_others: list[int] = []

    @property
    def reported(self) -> Mapping[str, Tier]:
        """The adapters of the last report."""
        return self._reported

    async def run(self) -> None:
        """Report until cancelled or withdrawn."""
        while not self._withdrawn:
            try:
                await self.report(time.monotonic())
            except ServiceError as error:
                if not self._failing:
                    _log.warning("The worker's status cannot be reported", action="report_failed", reason=str(error))
                self._failing = True
            else:
                self._failing = False
            await asyncio.sleep(REPORT_EVERY_S)
        await asyncio.Event().wait()

    async def report(self, now: float) -> None:
        """Write one report, unless it was withdrawn; raises ServiceError."""
        async with self._one_at_a_time:
            if not self._withdrawn:
                await self._report(now)

    async def _report(self, now: float) -> None:
        if now - self._listed_at >= LIST_DISK_EVERY_S:
            self._on_disk = await asyncio.to_thread(self._list_disk)
            self._listed_at = now
        report = self._collect(self._on_disk)
        replace = now - self._replaced_at >= REPLACE_EVERY_S
        async with transaction(self._pool, "report the worker's status") as connection:
            others = await status.write_report(connection, self._pool_name, self._worker, report)
            if replace:
                await status.replace_adapters(connection, self._pool_name, self._worker, report.adapters)
                await status.delete_gone(connection)
            else:
                changed = {
                    digest: tier for digest, tier in report.adapters.items() if self._reported.get(digest) != tier
                }
                removed = self._reported.keys() - report.adapters.keys()
                await status.write_adapters(connection, self._pool_name, self._worker, changed, removed)
        self._reported, self.loads_of_others = dict(report.adapters), others
        self._replaced_at = now if replace else self._replaced_at

    async def withdraw(self) -> None:
        """Delete the report, because the worker ends; one that cannot be deleted expires."""
        self._withdrawn = True
        try:
            async with self._one_at_a_time, transaction(self._pool, "withdraw the worker's status") as connection:
                await status.delete_own(connection, self._pool_name, self._worker)
        except ServiceError as error:
            _log.warning("The worker's status cannot be withdrawn", action="withdraw_failed", reason=str(error))
