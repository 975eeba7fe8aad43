"""`loraq.cancel_job` stores a cancellation that it cannot apply at once, and returns the job's state."""

from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import pytest

from services.client.identifiers import uuid7

TENANT = "acme"
JOB = """
with key as (
    insert into loraq.job_keys (tenant, job_id, accepted_on, fingerprint) values ($1, $2, current_date, '')
)
insert into loraq.jobs (tenant, job_id, pool, lane, state, accepted_on, accepted_at)
values ($1, $2, 'default', 'standard', $3, current_date, now())
"""
PARKED = """
insert into loraq.parked_jobs
    (tenant, job_id, accepted_on, pool, lane, reason, due_at, topic, partition_number, record_offset,
     record_timestamp_ms, request)
values ($1, $2, current_date, 'default', 'standard', 'adapter', now() + interval '1 hour', 'jobs', 0, 0, 0, '')
"""


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "insert into loraq.tenants (tenant, webhook_secret, producer_key) values ($1, '', '')", TENANT
    )
    yield connection
    await connection.close()


async def cancel(connection: asyncpg.Connection, job_id: UUID) -> str:
    return str(await connection.fetchval("select loraq.cancel_job($1, $2)", TENANT, job_id))


async def stored(connection: asyncpg.Connection) -> set[UUID]:
    return {row[0] for row in await connection.fetch("select job_id from loraq.cancellations")}


async def test_the_cancellation_of_an_unseen_job_is_stored_once(connection: asyncpg.Connection) -> None:
    job_id = uuid7()
    assert [await cancel(connection, job_id) for _ in range(2)] == ["unseen", "unseen"]
    assert await stored(connection) == {job_id}


@pytest.mark.parametrize("state", ["queued", "running", "parked"])
async def test_the_cancellation_of_an_unfinished_job_is_stored_for_its_worker(
    connection: asyncpg.Connection, state: str
) -> None:
    job_id = uuid7()
    await connection.execute(JOB, TENANT, job_id, state)
    assert await cancel(connection, job_id) == state
    assert await stored(connection) == {job_id}


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "expired"])
async def test_a_terminal_job_is_unchanged(connection: asyncpg.Connection, state: str) -> None:
    job_id = uuid7()
    await connection.execute(JOB, TENANT, job_id, state)
    assert await cancel(connection, job_id) == state
    assert await stored(connection) == set()


async def test_a_parked_job_is_due_at_once(connection: asyncpg.Connection) -> None:
    job_id = uuid7()
    await connection.execute(JOB, TENANT, job_id, "parked")
    await connection.execute(PARKED, TENANT, job_id)
    await cancel(connection, job_id)
    assert await connection.fetchval("select due_at <= clock_timestamp() from loraq.parked_jobs")


async def test_an_unknown_tenant_is_named(connection: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError, match='no tenant "stranger" is registered'):
        await connection.fetchval("select loraq.cancel_job('stranger', $1)", uuid7())
