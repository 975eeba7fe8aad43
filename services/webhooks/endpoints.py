"""Webhook endpoints: addresses registered under a tenant and a name."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from pydantic import TypeAdapter, ValidationError

from schemas.job import WebhookUrl
from services.errors import InputError
from services.parsing.names import checked_name
from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant

UPSERT = """
insert into loraq.webhook_endpoints (tenant, name, url) values ($1, $2, $3)
on conflict (tenant, name) do update set url = excluded.url, disabled_at = null, created_at = now()
where webhook_endpoints.disabled_at is not null or webhook_endpoints.url = excluded.url
returning true
"""
SELECT = """
select tenant, name, url, created_at from loraq.webhook_endpoints
where disabled_at is null and ($1::text is null or tenant = $1) order by tenant, name
"""
DISABLE = """
update loraq.webhook_endpoints set disabled_at = now()
where tenant = $1 and name = $2 and disabled_at is null returning true
"""
RESOLVE = """
select e.tenant, e.name, e.url
from unnest($1::text[], $2::text[]) as wanted (tenant, name)
join loraq.webhook_endpoints e on e.tenant = wanted.tenant and e.name = wanted.name
where e.disabled_at is null
"""


@dataclass(frozen=True)
class Endpoint:
    """A registered address that jobs refer to by name."""

    tenant: str
    name: str
    url: str
    created_at: datetime


async def add_endpoint(connection: Connection, tenant: str, name: str, url: str) -> None:
    """Register an address; idempotent. Raises InputError if the name is registered with another address."""
    checked_name("endpoint", name)
    checked_url(url)
    await require_tenant(connection, tenant)
    if not await connection.fetchval(UPSERT, tenant, name, url):
        raise InputError(f"tenant {tenant} has an endpoint {name} with another address; remove it first")


async def list_endpoints(connection: Connection, tenant: str | None = None) -> list[Endpoint]:
    """Active endpoints of one tenant or of all; raises InputError for an unknown tenant."""
    if tenant is not None:
        await require_tenant(connection, tenant)
    return [Endpoint(**row) for row in await connection.fetch(SELECT, tenant)]


async def remove_endpoint(connection: Connection, tenant: str, name: str) -> None:
    """Disable it for later jobs; webhooks of earlier jobs are still delivered. Raises InputError if it is unknown."""
    await require_tenant(connection, tenant)
    if not await connection.fetchval(DISABLE, tenant, name):
        raise InputError(f"tenant {tenant} has no endpoint {name}; see `loraq endpoints list --tenant {tenant}`")


async def resolve_endpoints(connection: Connection, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(tenant, endpoint name) → address, in one query; unknown endpoints are left out."""
    pairs = sorted(set(wanted))
    rows = await connection.fetch(RESOLVE, [tenant for tenant, _ in pairs], [name for _, name in pairs])
    return {(row["tenant"], row["name"]): row["url"] for row in rows}


def checked_url(url: str) -> str:
    """The URL itself; raises InputError unless it is a valid webhook address."""
    try:
        TypeAdapter(WebhookUrl).validate_python(url)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InputError(f"{url[:80]!r} is not a webhook address: {reason}") from error
    return url
