"""Codecs that store values correctly or refuse them, timeouts, and the table of errors."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import SecretStr

from services.errors import ConfigError, PermanentError, RetryableError, ServiceError
from services.localstack.ports import free_ports
from services.postgres.pool import (
    Pool,
    decode_time,
    encode_jsonb,
    encode_text,
    encode_time,
    install_codecs,
    listen,
    open_pool,
    storable,
    transaction,
    translate,
)
from services.process.settings import Settings
from tests.waiting import eventually

LOCK = "select pg_advisory_xact_lock(7)"
any_text = st.text(st.characters(exclude_categories=()), max_size=30)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with open_pool(settings) as pool:
        yield pool


@given(text=any_text, value=any_json.filter(lambda value: not isinstance(value, str)))
@hypothesis_settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_postgres_stores_any_text_that_a_model_can_generate(database_url: str, text: str, value: Any) -> None:
    async def check() -> None:
        connection = await asyncpg.connect(database_url)
        try:
            await install_codecs(connection)
            row = await connection.fetchrow("select $1::text, $2::jsonb, $3::text[]", text, value, [storable(text)])
        finally:
            await connection.close()
        assert row is not None
        assert row[0] == storable(text)
        assert row[2] == [storable(text)]

    asyncio.run(check())


@given(st.text(max_size=50).filter(lambda text: "\x00" not in text))
def test_ordinary_text_is_stored_unchanged(text: str) -> None:
    assert storable(text) == text
    assert encode_text(text).decode() == text


def test_characters_that_postgres_cannot_store_are_replaced() -> None:
    assert storable("a\x00b") == "a\u2400b"
    assert storable("a\ud800b") == "a\ufffdb"
    assert storable("\ud83d\ude00") == "\U0001f600", "a surrogate pair is one character"


def test_jsonb_refuses_values_that_are_already_encoded() -> None:
    for encoded in ('{"a": 1}', b'{"a": 1}'):
        with pytest.raises(TypeError, match="takes Python values"):
            encode_jsonb(encoded)
    assert encode_jsonb({"a": [math.nan, 1.5, "\x00"]}) == b'\x01{"a":[null,1.5,"\xe2\x90\x80"]}'


@pytest.mark.parametrize("prepare", [False, True], ids=["idle", "between preparing and executing"])
async def test_a_process_that_hangs_in_a_transaction_does_not_keep_its_locks_indefinitely(
    settings: Settings, prepare: bool
) -> None:
    async with open_pool(settings) as others:
        quick = settings.model_copy(update={"lease_s": 0.5, "database_timeout_s": 1.0})
        async with open_pool(quick) as pool:
            hanging = hang(pool, until=lock(others), prepare=prepare)
            with pytest.raises(RetryableError):
                await hanging


async def hang(pool: Pool, until: Coroutine[Any, Any, None], *, prepare: bool) -> None:
    async with transaction(pool, "hang") as connection:
        await connection.execute(LOCK)
        if prepare:
            await connection.prepare("select 2")
        await until
        await connection.execute("select 1")


async def lock(pool: Pool) -> None:
    async with transaction(pool, "lock") as connection:
        await connection.execute(LOCK)


async def test_wrong_types_fail_before_they_reach_the_table(pool: Pool) -> None:
    async with pool.acquire() as connection:
        with pytest.raises(asyncpg.DataError, match="takes Python values"):
            await connection.fetchval("select $1::jsonb", "{}")
        with pytest.raises(asyncpg.DataError, match="expected str"):
            await connection.fetchval("select $1::text", 5)
        with pytest.raises(asyncpg.DataError, match="no time zone"):
            await connection.fetchval("select $1::timestamptz", datetime(2026, 1, 1))  # noqa: DTZ001  # on purpose


@given(st.datetimes(min_value=datetime(1900, 1, 1), timezones=st.just(timezone(timedelta(hours=5, minutes=30)))))  # noqa: DTZ001  # hypothesis wants naive bounds
def test_times_keep_every_microsecond(moment: datetime) -> None:
    assert decode_time(encode_time(moment)) == moment


async def test_copy_works_with_the_codecs(pool: Pool) -> None:
    now = datetime.now(UTC)
    rows = [("a\x00", {"key": "value"}, now), ("b", {}, now)]
    async with transaction(pool) as connection:
        await connection.execute("create temporary table copied (t text, j jsonb, at timestamptz)")
        await connection.copy_records_to_table("copied", records=rows)
        found = [tuple(row) for row in await connection.fetch("select * from copied order by t")]
    assert found == [("a\u2400", {"key": "value"}, now), ("b", {}, now)]


async def test_an_exhausted_pool_is_an_error_not_a_hang(settings: Settings) -> None:
    small = settings.model_copy(update={"database_pool_size": 1, "database_timeout_s": 1.0})
    async with open_pool(small) as pool, transaction(pool):
        with pytest.raises(RetryableError, match="could not count jobs"):
            async with transaction(pool, "count jobs"):
                pass


async def test_a_long_statement_is_cancelled(settings: Settings) -> None:
    async with open_pool(settings.model_copy(update={"database_timeout_s": 1.0})) as pool:
        with pytest.raises(RetryableError, match="could not wait"):
            async with transaction(pool, "wait") as connection:
                await connection.execute("select pg_sleep(30)")


async def test_an_unreachable_server_is_named_without_its_password(settings: Settings) -> None:
    port = free_ports(1)[0]
    password = secrets.token_hex(8)
    unreachable = settings.model_copy(
        update={"database_url": SecretStr(f"postgresql://loraq:{password}@127.0.0.1:{port}/loraq")}
    )
    with pytest.raises(RetryableError, match=rf"connect to Postgres at 127\.0\.0\.1:{port}") as failed:
        async with open_pool(unreachable):
            pass
    assert password not in str(failed.value)


async def test_the_error_of_an_unmigrated_database_names_the_command(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="run `loraq migrate`"):
        async with transaction(pool, "list jobs") as connection:
            await connection.execute("select * from not_there")


async def test_listening_wakes_on_notify_and_reconnects(pool: Pool, settings: Settings) -> None:
    woken: list[None] = []
    task = asyncio.create_task(listen(settings, "a_channel", lambda: woken.append(None)))
    await eventually(lambda: len(woken) == 1, what="the first connection")
    await pool.execute("select pg_notify('a_channel', '')")
    await eventually(lambda: len(woken) == 2, what="the notification")
    await pool.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where query like 'LISTEN%' and datname = current_database()"
    )
    await eventually(lambda: len(woken) == 3, what="the second connection")
    task.cancel()


def postgres_error(state: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": state, "M": "it failed"})


TABLE: list[tuple[BaseException, type[ServiceError]]] = [
    (postgres_error("08006"), RetryableError),
    (postgres_error("25006"), RetryableError),
    (postgres_error("28P01"), ConfigError),
    (postgres_error("3D000"), ConfigError),
    (postgres_error("40001"), RetryableError),
    (postgres_error("40P01"), RetryableError),
    (postgres_error("42P01"), ConfigError),
    (postgres_error("42703"), ConfigError),
    (postgres_error("42501"), ConfigError),
    (postgres_error("42601"), PermanentError),
    (postgres_error("22P02"), PermanentError),
    (postgres_error("23505"), PermanentError),
    (postgres_error("53300"), RetryableError),
    (postgres_error("55P03"), RetryableError),
    (postgres_error("57014"), RetryableError),
    (postgres_error("57P01"), RetryableError),
    (postgres_error("58030"), RetryableError),
    (asyncpg.InterfaceError("the connection is closed"), RetryableError),
    (asyncpg.exceptions.ClientConfigurationError("bad URL"), ConfigError),
    # asyncpg sometimes raises this when the server ends a connection in the middle of an operation.
    (asyncpg.InternalClientError("cannot switch to state 11; another operation (2) is in progress"), RetryableError),
    (ConnectionRefusedError("refused"), RetryableError),
    (ConnectionResetError("reset"), RetryableError),
    (TimeoutError(), RetryableError),
]


@pytest.mark.parametrize(("theirs", "ours"), TABLE, ids=lambda value: getattr(value, "sqlstate", None))
def test_each_error_has_its_translation(theirs: BaseException, ours: type[ServiceError]) -> None:
    translated = translate(theirs, "list jobs")
    assert type(translated) is ours
    assert str(translated).startswith("could not list jobs: ")
