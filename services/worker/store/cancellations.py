"""Cancellation requests in the database, for jobs in this worker, in another one, or not yet received."""

from collections.abc import Collection
from datetime import timedelta

from services.postgres.pool import Pool, transaction
from services.worker.jobs import JobKey
from services.worker.store.statements import CANCEL_JOBS, CANCELLED_AMONG, DELETE_OLD_CANCELLATIONS

CHANNEL = "loraq_control"


class CancellationStore:
    """Reads and writes cancellation requests."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def cancel(self, keys: Collection[JobKey]) -> None:
        """Request the cancellation of these jobs, whether known or not; jobs of unknown tenants are skipped."""
        async with transaction(self._pool, "cancel jobs") as connection:
            await connection.execute(CANCEL_JOBS, *_columns(keys))

    async def requested_among(self, keys: Collection[JobKey]) -> set[JobKey]:
        """The subset of these jobs for which cancellation was requested."""
        async with transaction(self._pool, "look for cancellations") as connection:
            rows = await connection.fetch(CANCELLED_AMONG, *_columns(keys))
        return {JobKey(row["tenant"], row["job_id"]) for row in rows}

    async def delete_older_than(self, keep: timedelta) -> None:
        """Delete requests older than `keep`: records of such jobs can no longer arrive."""
        async with transaction(self._pool, "delete old cancellations") as connection:
            await connection.execute(DELETE_OLD_CANCELLATIONS, keep)


def _columns(keys: Collection[JobKey]) -> tuple[list[str], list[object]]:
    return [key.tenant for key in keys], [key.job_id for key in keys]
