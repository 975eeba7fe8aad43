"""Follows the tenants' limits in the database."""

import asyncio
from collections.abc import Callable, Mapping

from services.postgres.pool import Pool, autocommit
from services.tenants.limits import TenantLimits, read_limits
from services.worker.store.persistence import Persistence


class LimitsReader:
    """Reads the whole table, which is small, when it may have changed; `follow` receives what it holds."""

    def __init__(
        self,
        pool: Pool,
        persistence: Persistence,
        follow: Callable[[Mapping[str, TenantLimits]], None],
        poll_s: float,
    ) -> None:
        self._pool = pool
        self._persistence = persistence
        self._follow = follow
        self._poll_s = poll_s
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Read at once: the database sent a notification."""
        self._wake.set()

    async def run(self) -> None:
        """Read periodically until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.read()

    async def read(self) -> None:
        """Read the limits now."""
        self._follow(await self._persistence.retry_until_done(self._limits))

    async def _limits(self) -> Mapping[str, TenantLimits]:
        async with autocommit(self._pool, "read the tenants' limits") as connection:
            return await read_limits(connection)
