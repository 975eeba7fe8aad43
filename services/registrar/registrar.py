"""The registrar: admits or rejects every pending adapter, and creates the partitions of the coming days.

Each task claims one pending row (`for no key update skip locked`) and keeps the row lock while it checks the adapter.
So several registrars share the work, and the claims of one that dies are released.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from engine import AdapterError, AdapterInfo, check_adapter
from schemas.common import AdapterStatus
from services.adapters.base import BaseModel, load_base
from services.adapters.staging import Stager
from services.errors import JobError, RetryableError
from services.postgres.pool import Connection, Pool, listen, open_pool, transaction
from services.process import telemetry
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.registrar.backoff import Backoff
from services.s3.store import open_store

CHANNEL = "loraq_adapters"
NUM_TASKS = 3
MAINTENANCE_PERIOD_S = 3600.0
MAINTENANCE_RETRY_S = 60.0
DAYS_AHEAD = 7

CLAIM = """
select tenant, name, version, uri, digest, size_bytes from loraq.adapters
where status = 'pending' and not (tenant || '/' || name || '@' || version = any($1::text[]))
order by created_at limit 1
for no key update skip locked
"""
SETTLE = """
update loraq.adapters set status = $4, status_reason = $5, base_model = coalesce($6, base_model),
       base_fingerprint = $7, rank = $8, target_modules = $9
where tenant = $1 and name = $2 and version = $3
"""
DELAY = "update loraq.adapters set status_reason = $4 where tenant = $1 and name = $2 and version = $3"
LOCK_MAINTENANCE = "select pg_advisory_xact_lock(7236111902)"  # two registrars must not create a partition twice
ENSURE_PARTITIONS = "select loraq.ensure_partitions($1)"

log = telemetry.get_logger()


@dataclass(frozen=True)
class Ready:
    """The adapter fits the base model."""

    info: AdapterInfo
    remark: str | None


@dataclass(frozen=True)
class Rejected:
    """The adapter can never be served as it is."""

    reason: str


@dataclass(frozen=True)
class Delayed:
    """The adapter's files could not be fetched now; it stays pending."""

    reason: str


Verdict = Ready | Rejected | Delayed


class Registrar:
    """Admits adapters for one base model."""

    def __init__(self, pool: Pool, stager: Stager, base: BaseModel, poll_interval_s: float) -> None:
        self._pool = pool
        self._stager = stager
        self._base = base
        self._poll_interval_s = poll_interval_s
        self._backoff = Backoff()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look for pending adapters now instead of at the next poll."""
        self._woken.set()

    async def admit_until(self, stop: asyncio.Event) -> None:
        """Check one adapter after the other until `stop` is set."""
        while not stop.is_set():
            try:
                found = await self.admit_next()
            except RetryableError as error:
                log.warning("Admission interrupted", action="admission_interrupted", reason=str(error))
                found = False
            if not found:
                await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(self._poll_interval_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    async def admit_next(self) -> bool:
        """Admit or reject the oldest pending adapter that is due; returns False if there is none."""
        async with transaction(self._pool, "admit an adapter") as connection:
            row = await connection.fetchrow(CLAIM, self._backoff.waiting(time.monotonic()))
            if row is None:
                return False
            verdict = await self._examine(row)
            await self._settle(connection, row, verdict)
        return True

    async def _examine(self, row: asyncpg.Record) -> Verdict:
        try:
            async with self._stager.hold(row["digest"], row["uri"], row["size_bytes"]) as directory:
                info = await asyncio.to_thread(_check, directory, self._base.directory)
        except RetryableError as error:
            return Delayed(str(error))
        except (JobError, AdapterError) as error:
            return Rejected(str(error))
        except Exception as error:
            # An unexpected error caused by a hostile file must affect only this adapter.
            log.exception("Adapter check failed", action="adapter_check_failed", digest=row["digest"])
            return Rejected(f"checking its files raised {type(error).__name__}: {error}")
        return Ready(info, self._base.remark_on(info.base_model))

    async def _settle(self, connection: Connection, row: asyncpg.Record, verdict: Verdict) -> None:
        key = (row["tenant"], row["name"], row["version"])
        text = f"{row['tenant']}/{row['name']}@{row['version']}"
        if isinstance(verdict, Delayed):
            delay_s = self._backoff.failed(text, time.monotonic())
            await connection.execute(DELAY, *key, f"Not checked yet, retrying: {verdict.reason}")
            log.warning(
                "Adapter delayed", action="adapter_delayed", adapter=text, reason=verdict.reason, delay_s=delay_s
            )
            return
        self._backoff.settled(text)
        status, reason, *found = _columns(verdict, self._base)
        await connection.execute(SETTLE, *key, status, reason, *found)
        telemetry.ADAPTERS_ADMITTED.labels(status=status).inc()
        log.info("Adapter checked", action="adapter_judged", adapter=text, status=status, reason=reason)


def _columns(verdict: Ready | Rejected, base: BaseModel) -> tuple[object, ...]:
    """Returns status, status_reason, base_model, base_fingerprint, rank and target_modules."""
    if isinstance(verdict, Rejected):
        return AdapterStatus.REJECTED, verdict.reason, None, None, None, []
    info = verdict.info
    modules = list(info.target_modules)
    return AdapterStatus.READY, verdict.remark, info.base_model, base.fingerprint, info.rank, modules


def _check(directory: Path, model_dir: Path) -> AdapterInfo:
    """Run the engine's checks; error messages name files without the registrar's directories."""
    try:
        return check_adapter(directory, model_dir)
    except AdapterError as error:
        raise AdapterError(str(error).replace(f"{directory}/", "")) from error


async def maintain(pool: Pool) -> None:
    """Create the partitions of the next days, every hour."""
    while True:
        try:
            async with transaction(pool, "create partitions") as connection:
                await connection.execute(LOCK_MAINTENANCE)
                await connection.execute(ENSURE_PARTITIONS, DAYS_AHEAD)
            await asyncio.sleep(MAINTENANCE_PERIOD_S)
        except RetryableError as error:
            log.warning("Partitions not created", action="partitions_delayed", reason=str(error))
            await asyncio.sleep(MAINTENANCE_RETRY_S)


async def serve(life: Lifecycle, settings: Settings) -> None:
    """Run the registrar until `life` stops; raises ConfigError if the base model is missing or broken."""
    base = await asyncio.to_thread(load_base, settings)
    log.info("Base model loaded", action="base_known", base=str(base.directory), fingerprint=base.fingerprint)
    async with open_pool(settings) as pool, open_store(settings) as store:
        stager = Stager(settings, store)
        registrar = Registrar(pool, stager, base, settings.poll_interval_s)
        life.background("listen", listen(settings, CHANNEL, registrar.wake), endless=True)
        life.background("maintain", maintain(pool), endless=True)
        for number in range(max(1, min(NUM_TASKS, settings.database_pool_size - 1))):
            life.background(f"admission {number}", registrar.admit_until(life.stop))
        await life.until_stopped(grace_s=settings.poll_interval_s)
        await stager.close()
