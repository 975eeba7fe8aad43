"""Postgres: one pool per process, codecs that refuse values that would be stored wrongly, and one table of its errors.

The codecs replace U+0000 by U+2400 and lone surrogates by U+FFFD, in text and in jsonb. In jsonb, NaN and infinities
become null. Times must have a time zone. A str or bytes value for a jsonb column is refused, because it would be stored
as a JSON string. asyncpg encodes `text[]` without a codec, so pass text from users or models through `storable` before
you put it in an array.
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
# A prepared statement may keep the plan that was best for the contents of its tables when it was prepared. If that was
# an empty partition, as each day's is at midnight, it scans the whole partition for every batch until the next ANALYZE,
# however many rows are inserted meanwhile. Planning each execution again costs a batch less than 1 ms.
FRESH_PLANS = {"plan_cache_mode": "force_custom_plan"}

log = telemetry.get_logger()


class Pool(BasePool):
    """asyncpg's pool with a timeout on every acquire."""

    acquire_timeout_s = 30.0

    def acquire(self, *, timeout: float | None = None) -> Acquire:
        """A connection; waits at most `timeout` seconds (default: `acquire_timeout_s`)."""
        return super().acquire(timeout=self.acquire_timeout_s if timeout is None else timeout)


@asynccontextmanager
async def open_pool(settings: Settings, *, fresh_plans: bool = False) -> AsyncIterator[Pool]:
    """The process's pool, with at least one connection; raises ConfigError or RetryableError naming the server.

    `fresh_plans` is for a process whose tables grow fast: the server plans each execution again.

    A process that is suspended or cut off within a transaction must not keep its row locks indefinitely. So the server
    ends a session that idles in a transaction for longer than a lease, and any transaction after twice the statement
    timeout. The second limit is needed because between preparing and executing a statement, asyncpg leaves the server
    in the middle of an exchange, which does not count as idle. It requires PostgreSQL 17.
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
        reset=_skip_reset,
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


async def _skip_reset(_connection: object) -> None:
    """asyncpg's reset after each use costs a round trip, and our statements change no session state."""


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
    """A connection inside a transaction. Errors of the database are translated and name `action`."""
    with translated(action):
        async with pool.acquire() as connection, connection.transaction():
            yield connection


@asynccontextmanager
async def autocommit(pool: Pool, action: str) -> AsyncIterator[Connection]:
    """A connection whose statements each commit on their own, in one round trip. Errors are translated."""
    with translated(action):
        async with pool.acquire() as connection:
            yield connection


async def listen(settings: Settings, channel: str, wake: Callable[[], None]) -> None:
    """A background task: calls `wake` on every NOTIFY on the channel and after every (re)connect, until cancelled.

    It uses its own connection and reconnects. A NOTIFY can be missed, so callers also poll.
    """
    database_url = settings.database_url.get_secret_value()
    while True:
        try:
            connection = await asyncpg.connect(database_url, timeout=settings.database_timeout_s)
            try:
                await _listen_until_closed(connection, channel, wake)
            finally:
                connection.terminate()
            log.warning("The LISTEN connection was closed", action="listen_interrupted", channel=channel)
        except FOREIGN_ERRORS as error:
            log.warning("Cannot connect to LISTEN", action="listen_failed", channel=channel, reason=str(error))
        await asyncio.sleep(settings.poll_interval_s)


async def _listen_until_closed(connection: Connection, channel: str, wake: Callable[[], None]) -> None:
    closed = asyncio.Event()
    connection.add_termination_listener(lambda _connection: closed.set())
    await connection.add_listener(channel, lambda *_notification: wake())
    wake()  # for notifications that were missed while disconnected
    await closed.wait()


async def install_codecs(connection: Connection) -> None:
    """Set this module's codecs on a new connection. All are binary, so COPY works with them."""
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
    """The text with the characters that Postgres cannot store replaced: U+0000 by U+2400, lone surrogates by U+FFFD."""
    if text.isascii() and "\x00" not in text:
        return text
    text = text.replace("\x00", "\u2400")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encode_text(text: str) -> bytes:
    """UTF-8 of the storable text; raises TypeError for anything but str."""
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
    """The time in UTC."""
    return POSTGRES_EPOCH + encoded[0] * MICROSECOND


FOREIGN_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

# SQLSTATE or its two-character class → our error; the full code wins.
SQLSTATES: dict[str, type[ServiceError]] = {
    "08": RetryableError,  # connection lost
    "25006": RetryableError,  # read-only: a standby during a failover
    "25P03": RetryableError,  # idle in transaction for too long
    "25P04": RetryableError,  # in one transaction for too long
    "28": ConfigError,  # wrong user or password
    "3D": ConfigError,  # no such database
    "3F": ConfigError,  # no such schema: not migrated yet
    "40": RetryableError,  # serialization failure, deadlock
    "42501": ConfigError,  # the role lacks a privilege
    "42703": ConfigError,  # no such column: the schema is of another version
    "42P01": ConfigError,  # no such table: not migrated yet
    "53": RetryableError,  # out of connections, memory or disk
    "55P03": RetryableError,  # lock not available in time
    "57": RetryableError,  # shutting down, starting up, statement cancelled
    "58": RetryableError,  # the server's own disk or network
}
HINTS = {
    "3F": "run `loraq migrate`",
    "42P01": "run `loraq migrate`",
    "42703": "run `loraq migrate`, or deploy the version that the schema belongs to",
    "28": "check the user and password in LORAQ_DATABASE_URL",
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
    """Translates FOREIGN_ERRORS raised in the block: "could not <action>: …"."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise translate(error, action) from error
