"""Adapter versions: resolving names for the worker; listing, disabling and pinning for operators."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches

from schemas.common import AdapterStatus
from services.errors import InputError
from services.parsing.names import parse_ref
from services.postgres.pool import Connection
from services.tenants.tenants import require_tenant

RESOLVE = """
select wanted.ref, a.tenant, a.name, a.version, a.status, a.status_reason, a.digest, a.uri, a.size_bytes, a.rank,
       a.base_fingerprint, a.pinned
from unnest($1::text[], $2::text[], $3::text[], $4::integer[]) as wanted (tenant, ref, name, version)
cross join lateral (
    select * from loraq.adapters
    where tenant = wanted.tenant and name = wanted.name and (wanted.version is null or version = wanted.version)
    order by (status = 'ready') desc, version desc
    limit 1
) a
"""
COLUMNS = """
tenant, name, version, status, status_reason, base_model, base_fingerprint, rank, target_modules, uri, digest,
size_bytes, score, pinned, created_at
"""
LIST = f"""
select {COLUMNS} from loraq.adapters
where ($1::text is null or tenant = $1) and ($2::text is null or name = $2) and ($3::integer is null or version = $3)
order by tenant, name, version desc
"""  # noqa: S608  # the columns are a constant
NAMES = """
select name, (array_agg(version order by version desc))[:5] as versions
from loraq.adapters where tenant = $1 group by name
"""
DISABLE = """
update loraq.adapters set status = 'disabled', status_reason = $4
where tenant = $1 and name = $2 and ($3::integer is null or version = $3) and status in ('pending', 'ready')
returning version
"""
ENABLE = """
with enabled as (
    update loraq.adapters set status = case when base_fingerprint is null then 'pending' else 'ready' end,
                              status_reason = null
    where tenant = $1 and name = $2 and ($3::integer is null or version = $3) and status = 'disabled'
    returning version
)
select version, pg_notify('loraq_adapters', '') from enabled
"""
PIN = """
update loraq.adapters set pinned = $4
where tenant = $1 and name = $2 and ($3::integer is null or version = $3) and pinned <> $4
returning version
"""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of a tenant's adapter. `digest` identifies it; `uri` is the s3:// prefix of its two files.

    `rank` and `base_fingerprint` are None until it is admitted. A `pinned` one is evicted from memory last of all.
    """

    tenant: str
    name: str
    version: int
    status: AdapterStatus
    status_reason: str | None
    digest: str
    uri: str
    size_bytes: int
    rank: int | None = None
    base_fingerprint: str | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """A whole row of `loraq.adapters`."""

    tenant: str
    name: str
    version: int
    status: str
    status_reason: str | None
    base_model: str | None
    base_fingerprint: str | None
    rank: int | None
    target_modules: list[str]
    uri: str
    digest: str
    size_bytes: int
    score: float | None
    pinned: bool
    created_at: datetime

    @property
    def ref(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"


async def resolve(connection: Connection, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], AdapterVersion]:
    """(tenant, `name` or `name@3`) → version, in one query for the whole batch.

    A name resolves to its newest ready version, or to its newest version if none is ready, so that the caller can
    report its status. Adapters of other tenants are never returned. Raises InputError for a malformed reference.
    """
    refs = [(tenant, ref, *parse_ref(ref)) for tenant, ref in sorted(set(wanted))]
    if not refs:
        return {}
    tenants, texts, names, versions = zip(*refs, strict=True)
    rows = await connection.fetch(RESOLVE, tenants, texts, names, versions)
    return {(row["tenant"], row["ref"]): _version(dict(row)) for row in rows}


def _version(row: dict[str, object]) -> AdapterVersion:
    del row["ref"]
    status = AdapterStatus(str(row.pop("status")))
    return AdapterVersion(status=status, **row)  # type: ignore[arg-type]  # the statement names the fields


async def list_adapters(connection: Connection, tenant: str | None = None) -> list[AdapterRow]:
    """All versions, ordered by tenant and name, newest version first."""
    if tenant is not None:
        await require_tenant(connection, tenant)
    return [AdapterRow(**row) for row in await connection.fetch(LIST, tenant, None, None)]


async def show_adapter(connection: Connection, tenant: str, ref: str) -> list[AdapterRow]:
    """The versions that match `name` or `name@3`, newest first; raises InputError if there is none."""
    name, version = parse_ref(ref)
    await require_tenant(connection, tenant)
    rows = [AdapterRow(**row) for row in await connection.fetch(LIST, tenant, name, version)]
    if not rows:
        raise InputError(f"{tenant} has no adapter {ref}: {await suggestion(connection, tenant, ref)}")
    return rows


async def suggestion(connection: Connection, tenant: str, ref: str) -> str:
    """A hint for a reference that does not exist: the name's newest versions, the nearest name, or a command."""
    name, _ = parse_ref(ref)
    found = await connection.fetch(NAMES, tenant)
    versions = {row["name"]: row["versions"] for row in found}
    if name in versions:
        return f"it has {', '.join(f'{name}@{version}' for version in versions[name])}"
    if near := get_close_matches(name, versions, n=1):
        return f"did you mean {near[0]}?"
    return f"see `loraq adapters list --tenant {tenant}`"


async def disable(connection: Connection, tenant: str, ref: str, reason: str) -> list[int]:
    """Stop serving one version, or all versions of a name, to new jobs; returns the changed versions."""
    return await _change(connection, DISABLE, tenant, ref, reason)


async def enable(connection: Connection, tenant: str, ref: str) -> list[int]:
    """Serve disabled versions again, after a check if they were never admitted. Returns the changed versions."""
    name, version = parse_ref(ref)
    await show_adapter(connection, tenant, ref)
    return sorted(row["version"] for row in await connection.fetch(ENABLE, tenant, name, version))


async def set_pinned(connection: Connection, tenant: str, ref: str, *, pinned: bool) -> list[int]:
    """Pin versions in host memory, or unpin them; returns the changed versions."""
    return await _change(connection, PIN, tenant, ref, pinned)


async def _change(connection: Connection, statement: str, tenant: str, ref: str, value: object) -> list[int]:
    name, version = parse_ref(ref)
    await show_adapter(connection, tenant, ref)
    return sorted(row["version"] for row in await connection.fetch(statement, tenant, name, version, value))
