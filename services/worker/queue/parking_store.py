"""Parked jobs in the database: a job and its request are parked in one transaction, and claimed with a new fence."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from asyncpg import Record as Row

from schemas.common import Lane
from services.postgres.pool import Connection, Pool, autocommit, storable, transaction
from services.process import telemetry
from services.routing.status import LIVE_S
from services.worker.intake.records import parse
from services.worker.jobs import NO_TRIAL, Candidate, Job, JobKey, Record, Rejection
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue import parking_statements as sql
from services.worker.queue.preference import PREFER_HOLDER_S, Standpoint
from services.worker.store.decisions import Claimed
from services.worker.store.jobs import JobStore
from services.worker.store.rows import columns, fenced, keys_of

ANY_WORKER = Standpoint()
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class ParkRequest:
    """A job to park for `delay_s` seconds; None is until its tenant's limit has room.

    `cold_for_s` is how long it has already waited for its adapter.
    """

    job: Job
    reason: str
    delay_s: float | None
    cold_for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A parked request that is due."""

    candidate: Candidate
    accepted_on: date
    alone: bool
    cold_for_s: float | None

    @property
    def key(self) -> JobKey:
        """Key of the job."""
        return self.candidate.key


@dataclass(frozen=True, slots=True)
class Unparked:
    """A parked job that this worker has claimed. `claimed_at` is by the database's clock."""

    due: Due
    claimed: Claimed
    claimed_at: datetime


class ParkingStore:
    """Reads and writes the parked jobs of one pool for one worker."""

    def __init__(self, pool: Pool, store: JobStore, pool_name: str, worker: str, lease_s: float) -> None:
        self._pool = pool
        self._store = store
        self._pool_name = pool_name
        self._worker = worker
        self._lease = timedelta(seconds=lease_s)

    async def park(self, requests: Sequence[ParkRequest]) -> set[JobKey]:
        """Park jobs; returns the jobs that this worker still owned."""
        jobs = [each.job for each in requests]
        async with transaction(self._pool, "park jobs") as connection:
            rows = await connection.fetch(sql.PARK_JOBS, *fenced(jobs), [job.attempts for job in jobs])
            ours = keys_of(rows)
            parked = [_request_row(each) for each in requests if each.job.key in ours]
            if parked:
                await connection.execute(sql.STORE_REQUESTS, self._pool_name, *columns(parked, 17))
        return ours

    async def store_deliveries(self, candidates: Sequence[Candidate]) -> None:
        """Store the requests of jobs that another worker owns, in case it loses them."""
        rows = [(*each.key, str(each.record.lane), *_record_columns(each)) for each in candidates]
        async with transaction(self._pool, "park deliveries") as connection:
            await connection.execute(sql.STORE_DELIVERIES, self._pool_name, *columns(rows, 10))

    async def claim_due(
        self, lanes: Collection[Lane], limit: int, standpoint: Standpoint = ANY_WORKER
    ) -> list[Unparked]:
        """Claim due jobs that no worker owns, and delete the requests of jobs that have ended.

        Jobs that another worker should claim are left to it for `PREFER_HOLDER_S`.
        """
        async with transaction(self._pool, "claim parked jobs") as connection:
            rows = await connection.fetch(
                sql.DUE_JOBS,
                self._pool_name,
                [str(lane) for lane in lanes],
                limit,
                PREFER_HOLDER_S,
                self._worker,
                standpoint.saturated,
                [] if standpoint.saturated else list(standpoint.recent),
                standpoint.least_loaded,
                LIVE_S,
            )
            return await self._claim(connection, rows)

    async def over_limit(self, lanes: Collection[Lane]) -> list[tuple[str, Lane]]:
        """The tenants and lanes that have jobs parked for a limit."""
        async with autocommit(self._pool, "look up parked tenants") as connection:
            rows = await connection.fetch(sql.OVER_LIMIT, self._pool_name)
        return [(row["tenant"], Lane(row["lane"])) for row in rows if row["lane"] in lanes]

    async def claim_over_limit(self, places: Sequence[tuple[str, Lane, int]]) -> list[Unparked]:
        """Claim jobs that are parked for a limit: of each tenant and lane up to a number, the oldest first."""
        async with transaction(self._pool, "claim parked jobs") as connection:
            rows = await connection.fetch(sql.CLAIM_OVER_LIMIT, self._pool_name, *columns(places, 3))
            return await self._claim(connection, rows)

    async def _claim(self, connection: Connection, rows: Sequence[Row]) -> list[Unparked]:
        dues = [due for row in rows if (due := _due(row)) is not None]
        if not dues:
            return []
        keys = columns([(due.accepted_on, *due.key) for due in dues], 3)
        claimed = await connection.fetch(sql.CLAIM_DUE, *keys, self._worker, self._lease)
        await connection.execute(sql.DELETE_ENDED, *keys)
        await connection.execute(sql.POSTPONE_LEASED, *keys)
        return await self._resumed(connection, dues, claimed)

    async def _resumed(self, connection: Connection, dues: Sequence[Due], claimed: Sequence[Row]) -> list[Unparked]:
        claims = {JobKey(row["tenant"], row["job_id"]): row for row in claimed}
        ours = [due for due in dues if due.key in claims]
        resumed = await self._store.resume(connection, [due.candidate for due in ours], claims) if ours else {}
        return [Unparked(due, resumed[due.key], claims[due.key]["claimed_at"]) for due in ours]

    async def make_due(self, digest: str) -> None:
        """Make the jobs that are parked for this adapter due."""
        async with transaction(self._pool, "make parked jobs due") as connection:
            await connection.execute(sql.MAKE_ADAPTER_DUE, self._pool_name, digest)


def _request_row(request: ParkRequest) -> tuple[Any, ...]:
    job = request.job
    cold_for = None if request.cold_for_s is None else timedelta(seconds=request.cold_for_s)
    adapter = job.claim.adapter
    return (
        job.claim.accepted_on,
        *job.key,
        str(job.lane),
        request.reason,
        adapter.digest if adapter else None,
        cold_for,
        job.trial != NO_TRIAL,
        None if request.delay_s is None else timedelta(seconds=request.delay_s),
        job.request.deadline,
        *_record_columns(job.candidate),
    )


def _record_columns(candidate: Candidate) -> tuple[Any, ...]:
    record, traceparent = candidate.record, candidate.traceparent
    partition, offset = record.place
    return (
        partition.topic,
        partition.number,
        offset,
        record.timestamp_ms,
        record.key,
        record.value,
        None if traceparent is None else storable(traceparent),
    )


def _due(row: Row) -> Due | None:
    """The request as accepted; None, and the row stays, if this version cannot parse it but another may."""
    record = Record(
        place=Place(Partition(row["topic"], row["partition_number"]), row["record_offset"]),
        lane=Lane(row["lane"]),
        key=row["record_key"],
        value=row["request"],
        headers=(),
        timestamp_ms=row["record_timestamp_ms"],
    )
    parsed = parse(record, "", time.monotonic(), time.time_ns())
    if isinstance(parsed, Rejection):
        telemetry.alarm(_log, "A parked request cannot be parsed", action="parked_unreadable", reason=parsed.message)
        return None
    key = JobKey(row["tenant"], row["job_id"])
    candidate = parsed._replace(key=key, traceparent=row["traceparent"])
    return Due(candidate, row["accepted_on"], row["alone"], row["cold_for_s"])
