"""Parked jobs in the database: a job and its request move there in one transaction, and back under a new fence."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from asyncpg import Record as Row

from schemas.common import Lane
from services.postgres.pool import Connection, Pool, storable, transaction
from services.process import telemetry
from services.worker.intake.records import parse
from services.worker.jobs import NO_TRIAL, Candidate, Job, JobKey, Record, Rejection
from services.worker.offsets.ledger import Partition, Place
from services.worker.queue import parking_statements as sql
from services.worker.store.decisions import Taken
from services.worker.store.jobs import JobStore
from services.worker.store.rows import columns, fenced, keys_of

_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job that waits from now on in the database. `cold_for_s` is how long it has waited for its adapter so far."""

    job: Job
    reason: str
    delay_s: float
    cold_for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A parked request whose time has come."""

    candidate: Candidate
    accepted_on: date
    alone: bool
    cold_for_s: float | None

    @property
    def key(self) -> JobKey:
        """Identity of the job."""
        return self.candidate.key


@dataclass(frozen=True, slots=True)
class TakenUp:
    """A parked job that is ours now. `taken_at` is the database's clock."""

    due: Due
    taken: Taken
    taken_at: datetime


class ParkingStore:
    """Parked jobs of one pool as one worker sees them."""

    def __init__(self, pool: Pool, store: JobStore, pool_name: str, worker: str, lease_s: float) -> None:
        self._pool = pool
        self._store = store
        self._pool_name = pool_name
        self._worker = worker
        self._lease = timedelta(seconds=lease_s)

    async def park(self, tickets: Sequence[Ticket]) -> set[JobKey]:
        """Park jobs; returns those that were still ours."""
        jobs = [each.job for each in tickets]
        async with transaction(self._pool, "park jobs") as connection:
            rows = await connection.fetch(sql.PARK_JOBS, *fenced(jobs), [job.attempts for job in jobs])
            ours = keys_of(rows)
            requests = [_request_row(each) for each in tickets if each.job.key in ours]
            if requests:
                await connection.execute(sql.STORE_REQUESTS, self._pool_name, *columns(requests, 17))
        return ours

    async def store_deliveries(self, candidates: Sequence[Candidate]) -> None:
        """Keep the requests of jobs that another worker has, in case it loses them."""
        rows = [(*each.key, str(each.record.lane), *_record_columns(each)) for each in candidates]
        async with transaction(self._pool, "park deliveries") as connection:
            await connection.execute(sql.STORE_DELIVERIES, self._pool_name, *columns(rows, 10))

    async def take_due(self, lanes: Collection[Lane], limit: int) -> list[TakenUp]:
        """Take what is due and nobody has; the requests of jobs that ended meanwhile are deleted."""
        async with transaction(self._pool, "take parked jobs") as connection:
            rows = await connection.fetch(sql.DUE_JOBS, self._pool_name, [str(lane) for lane in lanes], limit)
            dues = [due for row in rows if (due := _due(row)) is not None]
            if not dues:
                return []
            keys = columns([(due.accepted_on, *due.key) for due in dues], 3)
            taken = await connection.fetch(sql.TAKE_DUE, *keys, self._worker, self._lease)
            await connection.execute(sql.DROP_ENDED, *keys)
            await connection.execute(sql.PUSH_ON, *keys)
            return await self._resumed(connection, dues, taken)

    async def _resumed(self, connection: Connection, dues: Sequence[Due], taken: Sequence[Row]) -> list[TakenUp]:
        grants = {JobKey(row["tenant"], row["job_id"]): row for row in taken}
        ours = [due for due in dues if due.key in grants]
        means = await self._store.resume(connection, [due.candidate for due in ours], grants) if ours else {}
        return [TakenUp(due, means[due.key], grants[due.key]["taken_at"]) for due in ours]

    async def hurry(self, digest: str) -> None:
        """What became of this adapter is known: its parked jobs are due."""
        async with transaction(self._pool, "hurry parked jobs") as connection:
            await connection.execute(sql.HURRY_ADAPTER, self._pool_name, digest)


def _request_row(ticket: Ticket) -> tuple[Any, ...]:
    job = ticket.job
    cold_for = None if ticket.cold_for_s is None else timedelta(seconds=ticket.cold_for_s)
    adapter = job.grant.adapter
    return (
        job.grant.accepted_on,
        *job.key,
        str(job.lane),
        ticket.reason,
        adapter.digest if adapter else None,
        cold_for,
        job.trial != NO_TRIAL,
        timedelta(seconds=ticket.delay_s),
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
    """The request as it was accepted; one that this version does not understand is left for one that does."""
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
        telemetry.alarm(_log, "Parked request not understood", action="parked_unreadable", reason=parsed.message)
        return None
    key = JobKey(row["tenant"], row["job_id"])
    candidate = parsed._replace(key=key, traceparent=row["traceparent"])
    return Due(candidate, row["accepted_on"], row["alone"], row["cold_for_s"])
