"""The demo's tenants and their adapters, pushed as by any user: to S3, as a pending version, for the registrar."""

import asyncio
from collections.abc import Collection, Sequence

from schemas.common import AdapterStatus
from services.adapters.push import inspect, push, wait_for_admission
from services.adapters.versions import AdapterRow
from services.demo.plan import Adapter
from services.errors import InputError, RetryableError
from services.postgres.pool import Pool, transaction
from services.process.settings import Settings
from services.s3.store import ObjectStore
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant, webhook_secrets

ADMISSION_TIMEOUT_S = 60.0


async def ensure_tenants(pool: Pool, settings: Settings, tenants: Collection[str]) -> dict[str, str]:
    """Add the tenants that do not exist yet; returns the webhook secret of each."""
    box = SecretBox(settings.secret_key)
    async with transaction(pool, "add the demo's tenants") as connection:
        known = await webhook_secrets(connection, box, tenants)
        new = [await add_tenant(connection, box, tenant) for tenant in sorted(set(tenants) - known.keys())]
    return known | {tenant.tenant: tenant.webhook_secret for tenant in new}


async def push_all(pool: Pool, store: ObjectStore, settings: Settings, adapters: Sequence[Adapter]) -> list[AdapterRow]:
    """Push every adapter and wait for the registrar; raises InputError with the reason if one is not ready."""
    return list(await asyncio.gather(*(_push(pool, store, settings, adapter) for adapter in adapters)))


async def _push(pool: Pool, store: ObjectStore, settings: Settings, adapter: Adapter) -> AdapterRow:
    local = await asyncio.to_thread(inspect, adapter.directory, settings.max_adapter_bytes)
    pushed = await push(pool, store, adapter.tenant, adapter.name, local)
    row = await wait_for_admission(pool, pushed, ADMISSION_TIMEOUT_S)
    if row.status == AdapterStatus.PENDING:
        raise RetryableError(f"{pushed.ref} of {adapter.tenant} is still pending after {ADMISSION_TIMEOUT_S:g} s")
    if row.status != AdapterStatus.READY:
        raise InputError(f"{pushed.ref} of {adapter.tenant} is {row.status}: {row.status_reason}")
    return row
