"""Postgres: one pool per process, codecs that refuse what would be stored wrongly, and one table of its errors.

Text passes one seam on its way in: U+0000 becomes U+2400 and lone surrogates become U+FFFD, in text and in jsonb.
In jsonb NaN and infinities become null. Times must carry a time zone. A str or bytes for a jsonb column is refused,
because it would be stored as a JSON string. asyncpg encodes `text[]` by itself and passes no codec: what
people or models say goes through `storable` before it becomes part of an array.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolAcquireContext, PoolConnectionProxy

from services.errors import ConfigError, PermanentError, RetryableError, ServiceError
from services.parsing.addresses import hosts_of
from services.process import telemetry
from services.process.settings import Settings

if TYPE_CHECKING:  # the stubs are generic, the classes are not
    BasePool = asyncpg.Pool[asyncpg.Record]
    Acquire = PoolAcquireContext[asyncpg.Record]
    Connection = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    BasePool, Acquire, Connection = asyncpg.Pool, PoolAcquireContext, asyncpg.Connection

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
JSONB_VERSION = b"\x01"
CLOSE_TIMEOUT_S = 5.0
# A prepared statement may keep the plan that was best for what its tables held when it was made. Made while a day's
# partition was empty, as each one is at midnight, it reads all of a partition for every batch until the next ANALYZE,
# however many rows come meanwhile. Planning each execution anew costs a batch less than 1 ms.
FRESH_PLANS = {"plan_cache_mode": "force_custom_plan"}

log = telemetry.get_logger()


class Pool(BasePool):
    """asyncpg's pool, except that no acquire waits for ever."""

    acquire_timeout_s = 30.0

    def acquire(self, *, timeout: float | None = None) -> Acquire:
        """A connection, waiting at most `timeout` seconds (default: the pool's own bound)."""
        return super().acquire(timeout=self.acquire_timeout_s if timeout is None else timeout)


@asynccontextmanager
async def open_pool(settings: Settings, *, fresh_plans: bool = False) -> AsyncIterator[Pool]:
    """The process's pool, connected at least once; raises ConfigError or RetryableError naming the server.

    `fresh_plans` is for a process whose statements meet a table that grows fast: each execution is planned anew.

    A process that stands still in the middle of a transaction (suspended, or cut off) must not hold its rows for ever:
    the server ends a session that idles in one for longer than a lease, and any transaction after twice the longest
    statement. The second is needed too: between a statement's preparation and its first execution asyncpg leaves the
    server in the middle of an exchange, which does not count as idle. It takes PostgreSQL 17.
    """
    database_url = settings.database_url.get_secret_value()
    pool = Pool(
        database_url,
        min_size=1,
        max_size=settings.database_pool_size,
        max_queries=50_000,
        max_inactive_connection_lifetime=300.0,
        connection_class=asyncpg.Connection,
        record_class=asyncpg.Record,
        loop=asyncio.get_running_loop(),
        init=install_codecs,
        reset=_keep_as_it_is,
        timeout=settings.database_timeout_s,
        command_timeout=settings.database_timeout_s,
        server_settings={
            "search_path": "loraq",
            "application_name": "loraq",
            "timezone": "UTC",
            "idle_in_transaction_session_timeout": _milliseconds(settings.lease_s),
            "transaction_timeout": _milliseconds(2 * settings.database_timeout_s),
            **(FRESH_PLANS if fresh_plans else {}),
        },
    )
    pool.acquire_timeout_s = settings.database_timeout_s
    with translated(f"connect to Postgres at {hosts_of(database_url)} (LORAQ_DATABASE_URL)"):
        await pool
    try:
        yield pool
    finally:
        await _close(pool)


async def _keep_as_it_is(_connection: object) -> None:
    """What asyncpg would reset after each use costs a round trip; nothing of ours changes a session's state."""


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


async def _close(pool: Pool) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await pool.close()
    except TimeoutError:
        pool.terminate()


@asynccontextmanager
async def transaction(pool: Pool, action: str = "use the database") -> AsyncIterator[Connection]:
    """A connection inside a transaction; foreign errors come out translated, naming `action`."""
    with translated(action):
        async with pool.acquire() as connection, connection.transaction():
            yield connection


@asynccontextmanager
async def pooled(pool: Pool, action: str) -> AsyncIterator[Connection]:
    """A connection whose every statement is a transaction by itself, in one round trip; errors come out translated."""
    with translated(action):
        async with pool.acquire() as connection:
            yield connection


async def listen(settings: Settings, channel: str, wake: Callable[[], None]) -> None:
    """A background task: calls `wake` at every NOTIFY on the channel and after every connecting, until cancelled.

    It has a connection of its own and reconnects by itself. NOTIFY is a hint: whoever listens also polls.
    """
    database_url = settings.database_url.get_secret_value()
    while True:
        try:
            connection = await asyncpg.connect(database_url, timeout=settings.database_timeout_s)
            try:
                await _listen_until_closed(connection, channel, wake)
            finally:
                connection.terminate()
            log.warning("Listening interrupted", action="listen_interrupted", channel=channel)
        except FOREIGN_ERRORS as error:
            log.warning("Listening impossible", action="listen_failed", channel=channel, reason=str(error))
        await asyncio.sleep(settings.poll_interval_s)


async def _listen_until_closed(connection: Connection, channel: str, wake: Callable[[], None]) -> None:
    closed = asyncio.Event()
    connection.add_termination_listener(lambda _connection: closed.set())
    await connection.add_listener(channel, lambda *_notification: wake())
    wake()  # for what was notified while nobody listened
    await closed.wait()


async def install_codecs(connection: Connection) -> None:
    """Set this module's codecs on a new connection; all are binary, so that COPY works with them."""
    await connection.set_type_codec(
        "jsonb", schema="pg_catalog", encoder=encode_jsonb, decoder=decode_jsonb, format="binary"
    )
    await connection.set_type_codec(
        "text", schema="pg_catalog", encoder=encode_text, decoder=bytes.decode, format="binary"
    )
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=encode_time, decoder=decode_time, format="tuple"
    )


def storable(text: str) -> str:
    """The text as Postgres can hold it: U+0000 as U+2400, lone surrogates as U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    text = text.replace("\x00", "\u2400")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encode_text(text: str) -> bytes:
    """UTF-8 of the storable form; raises TypeError for anything but str."""
    if not isinstance(text, str):
        raise TypeError(f"expected str for a text column, got {type(text).__name__}")
    return storable(text).encode()


def encode_jsonb(value: Any) -> bytes:
    """Binary jsonb of a dict, list, number, bool or None; raises TypeError for str and bytes."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a jsonb column takes Python values, not JSON in {type(value).__name__}")
    encoded = json.dumps(_storable_json(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return JSONB_VERSION + encoded.encode()


def _storable_json(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {storable(str(key)): _storable_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable_json(item) for item in value]
    return value


def decode_jsonb(encoded: bytes) -> Any:
    """The Python value of a binary jsonb."""
    return json.loads(encoded[1:])


def encode_time(value: datetime) -> tuple[int]:
    """Microseconds since 2000-01-01 UTC; raises ValueError for a datetime without a time zone."""
    if value.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; a timestamptz column needs one")
    return ((value - POSTGRES_EPOCH) // MICROSECOND,)


def decode_time(encoded: tuple[int]) -> datetime:
    """The moment, in UTC."""
    return POSTGRES_EPOCH + encoded[0] * MICROSECOND


FOREIGN_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

# SQLSTATE or its two-character class → what it means for the caller; the longer prefix wins.
SQLSTATES: dict[str, type[ServiceError]] = {
    "08": RetryableError,  # connection lost
    "25006": RetryableError,  # read-only: a standby during a failover
    "25P03": RetryableError,  # idle in transaction for too long
    "25P04": RetryableError,  # in one transaction for too long
    "28": ConfigError,  # wrong user or password
    "3D": ConfigError,  # no such database
    "3F": ConfigError,  # no such schema: not migrated
    "40": RetryableError,  # serialization failure, deadlock
    "42501": ConfigError,  # the role lacks a privilege
    "42703": ConfigError,  # no such column: migrated for other code
    "42P01": ConfigError,  # no such table: not migrated
    "53": RetryableError,  # out of connections, memory or disk
    "55P03": RetryableError,  # lock not available in time
    "57": RetryableError,  # shutting down, starting up, statement cancelled
    "58": RetryableError,  # the server's own disk or network
}
HINTS = {
    "3F": "run `loraq migrate`",
    "42P01": "run `loraq migrate`",
    "42703": "run `loraq migrate`, or bring code and schema to the same version",
    "28": "check user and password in LORAQ_DATABASE_URL",
    "3D": "create it, or check the name in LORAQ_DATABASE_URL",
}


def translate(error: BaseException, action: str) -> ServiceError:
    """Our error for one of FOREIGN_ERRORS: retryable, configuration, or permanent."""
    kind, hint = _meaning(error)
    text = str(error).strip() or type(error).__name__
    return kind(f"could not {action}: {text.splitlines()[0]}" + (f"; {hint}" if hint else ""))


def _meaning(error: BaseException) -> tuple[type[ServiceError], str | None]:
    match error:
        case asyncpg.PostgresError():
            state = error.sqlstate or ""
            prefixes = (state, state[:2])
            kind = next((SQLSTATES[prefix] for prefix in prefixes if prefix in SQLSTATES), PermanentError)
            return kind, next((HINTS[prefix] for prefix in prefixes if prefix in HINTS), None)
        case asyncpg.exceptions.ClientConfigurationError():
            return ConfigError, "check LORAQ_DATABASE_URL"
        case ValueError():
            return PermanentError, None
        case _:
            return RetryableError, None


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Turns foreign errors of the block into ours: "could not <action>: …"."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise translate(error, action) from error
