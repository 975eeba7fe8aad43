"""Resolving names: the newest ready version, a fixed version, and never one of another tenant."""

import asyncio

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.common import AdapterStatus
from services.adapters.versions import resolve
from services.postgres.pool import Connection, Pool, install_codecs, transaction
from services.process.settings import Settings
from tests.services.conftest import add_tenants

TENANTS = ("acme", "globex")
NAMES = ("tone", "sql")
Version = tuple[str, str, int, AdapterStatus]
INSERT = """
insert into loraq.adapters (tenant, name, version, status, uri, digest, size_bytes)
values ($1, $2, $3::integer, $4, 's3://bucket/', format('%s/%s@%s', $1::text, $2::text, $3::integer), 1)
"""

fleets = st.dictionaries(
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(NAMES), st.integers(1, 4)), st.sampled_from(AdapterStatus)
).map(lambda found: [(*key, status) for key, status in found.items()])
refs = st.builds(
    lambda name, version: f"{name}@{version}" if version else name,
    st.sampled_from(NAMES),
    st.one_of(st.none(), st.integers(1, 5)),
)
requests = st.lists(st.tuples(st.sampled_from((*TENANTS, "nobody")), refs), max_size=8)


@pytest.fixture
async def tenants(pool: Pool, settings: Settings) -> None:
    await add_tenants(pool, settings, *TENANTS)


async def insert(connection: Connection, fleet: list[Version]) -> None:
    await connection.executemany(INSERT, fleet)


def expected(fleet: list[Version], tenant: str, ref: str) -> tuple[str, int, AdapterStatus] | None:
    """The same rule in plain Python."""
    name, _, version = ref.partition("@")
    mine = [(found[2], found[3]) for found in fleet if found[:2] == (tenant, name)]
    if version:
        mine = [found for found in mine if found[0] == int(version)]
    ready = [found for found in mine if found[1] is AdapterStatus.READY]
    newest = max(ready or mine, default=None)
    return None if newest is None else (f"{tenant}/{name}@{newest[0]}", *newest)


@given(fleet=fleets, wanted=requests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_sees_the_newest_ready_versions_of_its_own_tenants_only(
    database_url: str, fleet: list[Version], wanted: list[tuple[str, str]]
) -> None:
    async def check() -> None:
        connection = await asyncpg.connect(database_url, server_settings={"search_path": "loraq"})
        await install_codecs(connection)
        try:
            async with connection.transaction():
                await connection.execute("truncate adapters, tenants cascade")
                await connection.executemany("insert into tenants values ($1, '', '')", [(name,) for name in TENANTS])
                await insert(connection, fleet)
                found = await resolve(connection, wanted)
        finally:
            await connection.close()
        right = {(tenant, ref): expected(fleet, tenant, ref) for tenant, ref in wanted}
        assert {key: (row.digest, row.version, row.status) for key, row in found.items()} == {
            key: value for key, value in right.items() if value is not None
        }
        assert all(row.tenant == tenant for (tenant, _), row in found.items())

    asyncio.run(check())


async def test_a_batch_is_one_query(pool: Pool, tenants: None) -> None:
    async with transaction(pool) as connection:
        await insert(connection, [("acme", "tone", version, AdapterStatus.READY) for version in (1, 2)])
        await resolve(connection, [("acme", "other")])  # a new connection asks for the types once
        queries: list[str] = []
        with connection.query_logger(lambda record: queries.append(record.query)):
            found = await resolve(connection, [("acme", "tone"), ("acme", "tone@1"), ("globex", "tone")])
    assert len(queries) == 1
    assert {key[1]: row.version for key, row in found.items()} == {"tone": 2, "tone@1": 1}


async def test_an_empty_batch_runs_no_query(pool: Pool) -> None:
    async with transaction(pool) as connection:
        assert await resolve(connection, []) == {}


async def test_without_a_ready_version_the_newest_is_returned_with_its_reason(pool: Pool, tenants: None) -> None:
    async with transaction(pool) as connection:
        await insert(
            connection, [("acme", "tone", 1, AdapterStatus.DISABLED), ("acme", "tone", 2, AdapterStatus.REJECTED)]
        )
        await connection.execute("update adapters set status_reason = 'It is broken.' where version = 2")
        found = await resolve(connection, [("acme", "tone")])
    assert found["acme", "tone"].status is AdapterStatus.REJECTED
    assert found["acme", "tone"].status_reason == "It is broken."
