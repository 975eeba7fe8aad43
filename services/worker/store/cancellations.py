"""Cancellations that the database remembers, for jobs that are here, elsewhere or not yet seen."""

from collections.abc import Collection
from datetime import timedelta

from services.postgres.pool import Pool, transaction
from services.worker.jobs import JobKey
from services.worker.store.statements import CANCEL_JOBS, CANCELLED_AMONG, FORGET_CANCELLATIONS

CHANNEL = "loraq_control"


class CancellationStore:
    """What the database remembers of cancellations."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def cancel(self, keys: Collection[JobKey]) -> None:
        """Ask for these jobs to be cancelled, whatever is known of them; those of unknown tenants are passed over."""
        async with transaction(self._pool, "cancel jobs") as connection:
            await connection.execute(CANCEL_JOBS, *_columns(keys))

    async def among(self, keys: Collection[JobKey]) -> set[JobKey]:
        """Those of the jobs that were asked to be cancelled."""
        async with transaction(self._pool, "look for cancellations") as connection:
            rows = await connection.fetch(CANCELLED_AMONG, *_columns(keys))
        return {JobKey(row["tenant"], row["job_id"]) for row in rows}

    async def forget(self, keep: timedelta) -> None:
        """Delete what is older than that: no record of such a job can arrive any more."""
        async with transaction(self._pool, "forget cancellations") as connection:
            await connection.execute(FORGET_CANCELLATIONS, keep)


def _columns(keys: Collection[JobKey]) -> tuple[list[str], list[object]]:
    return [key.tenant for key in keys], [key.job_id for key in keys]
