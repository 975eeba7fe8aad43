"""Pushing an adapter: runs the checks that need no base model, then uploads. The registrar decides on admission."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import AdapterError, adapter_digest
from engine.files.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.files.tensorfile import TensorFileError, read_tensor_file
from engine.lora.peft import PICKLED_WEIGHTS
from engine.lora.peft_config import read_peft_config
from schemas.common import AdapterStatus
from services.adapters.versions import AdapterRow, show_adapter
from services.errors import InputError
from services.parsing.names import checked_name
from services.postgres.pool import Connection, Pool, transaction, translated
from services.s3.store import Location, ObjectStore
from services.tenants.tenants import require_tenant

ADMISSION_POLL_S = 0.2

LOCK_NAME = "select pg_advisory_xact_lock(hashtextextended('loraq.adapters/' || $1::text || '/' || $2::text, 0))"
NEWEST = """
select version, digest, status from loraq.adapters where tenant = $1 and name = $2 order by version desc limit 1
"""
INSERT = """
insert into loraq.adapters (tenant, name, version, status, base_model, uri, digest, size_bytes)
values ($1, $2, $3, 'pending', $4, $5, $6, $7)
"""
CHECK_AGAIN = """
update loraq.adapters set status = 'pending', status_reason = null where tenant = $1 and name = $2 and version = $3
"""
WAKE_REGISTRAR = "select pg_notify('loraq_adapters', '')"


@dataclass(frozen=True)
class LocalAdapter:
    """A PEFT directory that passed the checks that need no base model."""

    directory: Path
    digest: str
    size_bytes: int
    base_model: str | None


@dataclass(frozen=True)
class Pushed:
    """The result of a push: a new version, or the newest one if it has the same content."""

    tenant: str
    name: str
    version: int
    created: bool

    @property
    def ref(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


def inspect(directory: Path, max_bytes: int) -> LocalAdapter:
    """Check a directory before uploading; raises InputError naming the invalid file or field."""
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; an adapter is a PEFT directory")
    try:
        config = read_peft_config(directory / ADAPTER_CONFIG)
        _check_weights(directory)
        size_bytes = sum((directory / name).stat().st_size for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
        if size_bytes > max_bytes:
            raise InputError(f"{directory} has {size_bytes} bytes, more than {max_bytes} (LORAQ_MAX_ADAPTER_BYTES)")
        return LocalAdapter(directory, adapter_digest(directory), size_bytes, config.base_model)
    except (AdapterError, TensorFileError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error


def _check_weights(directory: Path) -> None:
    weights = directory / ADAPTER_WEIGHTS
    pickled = next((name for name in PICKLED_WEIGHTS if (directory / name).exists()), None)
    if not weights.is_file() and pickled is not None:
        raise InputError(
            f"{directory / pickled} is a pickle, which can run code when loaded; save the adapter as {ADAPTER_WEIGHTS}"
        )
    if not weights.is_file():
        raise InputError(f"{weights} does not exist; an adapter is {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    read_tensor_file(weights)


async def push(
    pool: Pool,
    store: ObjectStore,
    tenant: str,
    name: str,
    local: LocalAdapter,
    progress: Callable[[int], object] | None = None,
) -> Pushed:
    """Upload both files, then record a pending version, unless the newest version has the same content.

    `progress` is called from a thread with the bytes sent since the last call. Raises InputError for an unknown tenant.
    """
    checked_name("adapter", name)
    with translated("look up the tenant"):
        async with pool.acquire() as connection:
            await require_tenant(connection, tenant)
    prefix = Location(store.bucket, f"{tenant}/{name}/{local.digest}/")
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        await store.put_file(prefix.child(file), local.directory / file, progress)
    async with transaction(pool, "record the adapter") as connection:
        return await _record(connection, tenant, name, prefix.uri, local)


async def _record(connection: Connection, tenant: str, name: str, uri: str, local: LocalAdapter) -> Pushed:
    await connection.execute(LOCK_NAME, tenant, name)
    newest = await connection.fetchrow(NEWEST, tenant, name)
    if newest is not None and newest["digest"] == local.digest:
        if newest["status"] == AdapterStatus.REJECTED:
            await connection.execute(CHECK_AGAIN, tenant, name, newest["version"])
            await connection.execute(WAKE_REGISTRAR)
        return Pushed(tenant, name, newest["version"], created=False)
    version = 1 if newest is None else newest["version"] + 1
    await connection.execute(INSERT, tenant, name, version, local.base_model, uri, local.digest, local.size_bytes)
    await connection.execute(WAKE_REGISTRAR)
    return Pushed(tenant, name, version, created=True)


async def wait_for_admission(pool: Pool, pushed: Pushed, timeout_s: float) -> AdapterRow:
    """The version's row when it is no longer pending, or after `timeout_s` seconds."""
    give_up_at = asyncio.get_running_loop().time() + timeout_s
    while True:
        async with transaction(pool, "look up the adapter") as connection:
            (row,) = await show_adapter(connection, pushed.tenant, pushed.ref)
        if row.status != AdapterStatus.PENDING or asyncio.get_running_loop().time() >= give_up_at:
            return row
        await asyncio.sleep(ADMISSION_POLL_S)
