"""Limits per tenant: reading and changing them in the database."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from asyncpg import Record as Row

from schemas.common import OverLimit
from services.errors import InputError
from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant

DEFAULT_BURST_S = 10.0
SELECT_ALL = "select tenant, weight, running, queued, tokens_per_s, burst, over_limit from loraq.tenant_limits"
SELECT_ONE = """
select weight, running, queued, tokens_per_s, burst, over_limit from loraq.tenant_limits where tenant = $1
"""
LOCK = "select from loraq.tenants where tenant = $1 for update"
UPSERT = """
insert into loraq.tenant_limits (tenant, weight, running, queued, tokens_per_s, burst, over_limit)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (tenant) do update
set weight = excluded.weight,
    running = excluded.running,
    queued = excluded.queued,
    tokens_per_s = excluded.tokens_per_s,
    burst = excluded.burst,
    over_limit = excluded.over_limit,
    changed_at = now()
"""
DELETE = "delete from loraq.tenant_limits where tenant = $1"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits in a pool; None means no limit. The defaults are those of a tenant without a row.

    `running` and `queued` are numbers of jobs, `burst` is tokens that may be used at once after a pause.
    """

    weight: float = 1.0
    running: int | None = None
    queued: int | None = None
    tokens_per_s: float | None = None
    burst: float | None = None
    over_limit: OverLimit = OverLimit.WAIT

    @property
    def burst_tokens(self) -> float:
        """The burst, or its default."""
        return DEFAULT_BURST_S * (self.tokens_per_s or 0.0) if self.burst is None else self.burst


NO_LIMITS = TenantLimits()
NAMES = tuple(field.name for field in fields(TenantLimits))


async def read_limits(connection: Connection) -> dict[str, TenantLimits]:
    """The limits of every tenant that has any."""
    return {row["tenant"]: _limits(row) for row in await connection.fetch(SELECT_ALL)}


async def show_limits(connection: Connection, tenant: str) -> TenantLimits:
    """One tenant's limits; raises InputError if the tenant does not exist."""
    await require_tenant(connection, tenant)
    row = await connection.fetchrow(SELECT_ONE, tenant)
    return NO_LIMITS if row is None else _limits(row)


async def change_limits(
    connection: Connection, tenant: str, changes: Mapping[str, Any], clear: Collection[str]
) -> TenantLimits:
    """Reset the limits named in `clear` to their defaults, then set those in `changes`; returns the result.

    Workers are notified. Raises InputError if the tenant does not exist or the limits contradict each other.
    """
    await connection.execute(LOCK, tenant)
    defaults = {name: getattr(NO_LIMITS, name) for name in clear}
    limits = replace(await show_limits(connection, tenant), **(defaults | dict(changes)))
    if limits.burst is not None and limits.tokens_per_s is None:
        raise InputError("a burst needs a limit of tokens per second; set --tokens-per-s, or add --clear burst")
    if limits == NO_LIMITS:
        await connection.execute(DELETE, tenant)
    else:
        await connection.execute(UPSERT, tenant, *asdict(limits).values())
    return limits


def _limits(row: Row) -> TenantLimits:
    return TenantLimits(**{name: row[name] for name in NAMES} | {"over_limit": OverLimit(row["over_limit"])})
