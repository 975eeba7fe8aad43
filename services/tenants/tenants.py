"""Tenants and their two secrets: one signs webhooks to the tenant, the other signs records from it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from services.errors import ConfigError, InputError
from services.parsing.names import checked_name, is_name
from services.parsing.validation import shown
from services.postgres.pool import Connection
from services.tenants.secrets import SecretBox, new_producer_key, new_webhook_secret

INSERT = """
insert into loraq.tenants (tenant, webhook_secret, producer_key) values ($1, $2, $3)
on conflict do nothing returning created_at
"""
SELECT_ALL = """
select t.tenant, t.created_at, t.disabled_at,
       (select count(distinct name) from loraq.adapters a where a.tenant = t.tenant) as adapters,
       (select count(*) from loraq.webhook_endpoints e where e.tenant = t.tenant and e.disabled_at is null) as endpoints
from loraq.tenants t where $1::text is null or t.tenant = $1 order by t.tenant
"""
EXISTS = "select exists (select from loraq.tenants where tenant = $1)"
WEBHOOK_SECRETS = "select tenant, webhook_secret from loraq.tenants where tenant = any($1::text[])"
NEWEST_SECRETS = "select webhook_secret from loraq.tenants order by created_at desc limit $1"
PRODUCER_KEYS = """
select tenant, producer_key from loraq.tenants where tenant = any($1::text[]) and disabled_at is null
"""


CHECKED_SECRETS = 10


@dataclass(frozen=True)
class NewTenant:
    """A new tenant with its secrets, which are shown only at creation."""

    tenant: str
    webhook_secret: str
    producer_key: str


@dataclass(frozen=True)
class Tenant:
    """A tenant as listed; `adapters` counts names, not versions."""

    tenant: str
    created_at: datetime
    disabled_at: datetime | None
    adapters: int
    endpoints: int


async def add_tenant(connection: Connection, box: SecretBox, tenant: str) -> NewTenant:
    """Add a tenant with new secrets; raises InputError if the name is in use."""
    checked_name("tenant", tenant)
    new = NewTenant(tenant, new_webhook_secret(), new_producer_key())
    sealed = (box.seal(new.webhook_secret.encode()), box.seal(new.producer_key.encode()))
    if await connection.fetchval(INSERT, tenant, *sealed) is None:
        raise InputError(f"tenant {tenant} already exists; see `loraq tenants show {tenant}`")
    return new


async def list_tenants(connection: Connection) -> list[Tenant]:
    """All tenants by name."""
    return [Tenant(**row) for row in await connection.fetch(SELECT_ALL, None)]


async def show_tenant(connection: Connection, tenant: str) -> Tenant:
    """One tenant; raises InputError if it does not exist."""
    rows = await connection.fetch(SELECT_ALL, tenant)
    if not rows:
        raise unknown_tenant(tenant)
    return Tenant(**rows[0])


async def require_tenant(connection: Connection, tenant: str) -> None:
    """Raises InputError if the tenant does not exist."""
    if not await connection.fetchval(EXISTS, tenant):
        raise unknown_tenant(tenant)


def unknown_tenant(tenant: str) -> InputError:
    """The error for a tenant that does not exist."""
    if not is_name(tenant):
        return InputError(f"{shown(tenant)} is not a valid tenant name; see `loraq tenants list`")
    return InputError(f"there is no tenant {tenant}; add it with `loraq tenants add {tenant}`")


async def webhook_secrets(connection: Connection, box: SecretBox, tenants: Collection[str]) -> dict[str, str]:
    """`whsec_…` of each existing tenant, in one query."""
    rows = await connection.fetch(WEBHOOK_SECRETS, sorted(set(tenants)))
    return {row["tenant"]: box.open(row["webhook_secret"]).decode() for row in rows}


async def check_secret_key(connection: Connection, box: SecretBox) -> None:
    """Raises ConfigError if there are tenants and the box can open none of the newest secrets.

    A single secret that cannot be opened may be damaged, which must not block the other tenants.
    """
    problem = None
    for row in await connection.fetch(NEWEST_SECRETS, CHECKED_SECRETS):
        try:
            box.open(row["webhook_secret"])
        except ConfigError as error:
            problem = error
        else:
            return
    if problem is not None:
        raise ConfigError(
            "LORAQ_SECRET_KEY is not the key that the tenants' secrets were sealed with: none of them can be opened;"
            " set the same key for every process"
        ) from problem


@dataclass(frozen=True)
class ProducerKeys:
    """HMAC keys by tenant, and the tenants whose key is damaged."""

    opened: Mapping[str, bytes]
    damaged: frozenset[str]


async def producer_keys(connection: Connection, box: SecretBox, tenants: Collection[str]) -> ProducerKeys:
    """Producer keys of the tenants that exist and are not disabled, in one query.

    Raises ConfigError if LORAQ_SECRET_KEY is not the key that the tenants' secrets were sealed with.
    """
    opened, damaged = {}, set()
    for row in await connection.fetch(PRODUCER_KEYS, sorted(filter(is_name, set(tenants)))):
        try:
            opened[row["tenant"]] = box.open(row["producer_key"])
        except ConfigError:
            damaged.add(row["tenant"])
    if damaged:
        await check_secret_key(connection, box)
    return ProducerKeys(opened, frozenset(damaged))


def damaged_key(tenant: str) -> str:
    """The error message for a tenant's damaged producer key."""
    return f"the producer key of tenant {tenant!r} is damaged in the database; restore it from a backup"
