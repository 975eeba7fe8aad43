"""What workers report about themselves, in `loraq.worker_status` and `loraq.worker_adapters`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from services.postgres.pool import Connection

Tier: TypeAlias = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
LIVE_S = 10.0
"""A worker that has not reported for so long is not preferred for a job."""
GONE_S = 60.0
"""A report of that age is deleted."""

# Both tables are unlogged: a crash of the server empties them, and workers write them again.
REPORT = """
insert into loraq.worker_status as status
    (pool, worker, started_at, seen_at, engine_ready, running, waiting, waiting_bytes, loaded_adapters,
     resident_adapters, tokens_per_s, saturated, details)
values ($1, $2, clock_timestamp() - make_interval(secs => $3), clock_timestamp(), $4, $5, $6, $7, $8, $9, $10, $11, $12)
on conflict (pool, worker) do update
set seen_at = excluded.seen_at, engine_ready = excluded.engine_ready, running = excluded.running,
    waiting = excluded.waiting, waiting_bytes = excluded.waiting_bytes, loaded_adapters = excluded.loaded_adapters,
    resident_adapters = excluded.resident_adapters, tokens_per_s = excluded.tokens_per_s,
    saturated = excluded.saturated, details = excluded.details
"""
LOADS_OF_OTHERS = """
select running + waiting as load from loraq.worker_status
where pool = $1 and worker <> $2 and engine_ready and seen_at > clock_timestamp() - make_interval(secs => $3)
"""
ADD_ADAPTERS = """
insert into loraq.worker_adapters (pool, worker, digest, tier)
select $1, $2, digest, tier from unnest($3::text[], $4::text[]) as sent (digest, tier)
on conflict (pool, digest, worker) do update set tier = excluded.tier where worker_adapters.tier <> excluded.tier
"""
REMOVE_ADAPTERS = "delete from loraq.worker_adapters where pool = $1 and worker = $2 and digest = any($3::text[])"
REMOVE_OTHER_ADAPTERS = (
    "delete from loraq.worker_adapters where pool = $1 and worker = $2 and digest <> all($3::text[])"
)
DELETE_GONE = "delete from loraq.worker_status where seen_at < clock_timestamp() - make_interval(secs => $1)"
DELETE_OWN = "delete from loraq.worker_status where pool = $1 and worker = $2"
LIST = """
select pool, worker, started_at, extract(epoch from clock_timestamp() - seen_at)::float8 as age_s, engine_ready,
       running, waiting, tokens_per_s, saturated, details
from loraq.worker_status
where $1::text is null or pool = $1
order by pool, worker
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker reports. `waiting_bytes` is the memory of its waiting jobs, `uptime_s` is seconds.

    A worker is saturated if a job that it claimed now would wait for long. `busiest` is tokens by (tenant, adapter) of
    the last minute, of the adapters with most; `tokens` is those of all jobs.
    """

    uptime_s: float
    engine_ready: bool
    running: int
    waiting: int
    waiting_bytes: int
    tokens_per_s: float
    saturated: bool
    lanes: Sequence[str]
    partitions: int
    adapters: Mapping[str, Tier] = field(default_factory=dict)
    tokens: float = 0.0
    busiest: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def count(self, tier: Tier) -> int:
        """Number of adapters whose fastest tier is `tier`."""
        return sum(each == tier for each in self.adapters.values())

    def details(self) -> dict[str, Any]:
        """The column of that name."""
        return {
            "lanes": list(self.lanes),
            "partitions": self.partitions,
            "adapters": {tier: self.count(tier) for tier in TIERS},
            "tokens": self.tokens,
            "busiest": [[tenant, adapter, tokens] for (tenant, adapter), tokens in self.busiest.items()],
        }


async def write_report(connection: Connection, pool: str, worker: str, report: Report) -> list[int]:
    """Write the worker's row; returns the jobs that each other live worker of the pool has."""
    await connection.execute(
        REPORT,
        pool,
        worker,
        report.uptime_s,
        report.engine_ready,
        report.running,
        report.waiting,
        report.waiting_bytes,
        report.count("device") + report.count("host"),
        report.count("device"),
        report.tokens_per_s,
        report.saturated,
        report.details(),
    )
    return [row["load"] for row in await connection.fetch(LOADS_OF_OTHERS, pool, worker, LIVE_S)]


async def write_adapters(
    connection: Connection, pool: str, worker: str, changed: Mapping[str, Tier], removed: Collection[str]
) -> None:
    """Record where the worker has adapters, and those that it has no longer."""
    if changed:
        await connection.execute(ADD_ADAPTERS, pool, worker, list(changed), list(changed.values()))
    if removed:
        await connection.execute(REMOVE_ADAPTERS, pool, worker, list(removed))


async def replace_adapters(connection: Connection, pool: str, worker: str, adapters: Mapping[str, Tier]) -> None:
    """Record all adapters of the worker, and forget all others."""
    await connection.execute(REMOVE_OTHER_ADAPTERS, pool, worker, list(adapters))
    await write_adapters(connection, pool, worker, adapters, ())


async def delete_gone(connection: Connection) -> None:
    """Delete the reports of workers that ended without deleting theirs."""
    await connection.execute(DELETE_GONE, GONE_S)


async def delete_own(connection: Connection, pool: str, worker: str) -> None:
    """Delete the worker's report: it ends."""
    await connection.execute(DELETE_OWN, pool, worker)


async def list_workers(connection: Connection, pool: str | None) -> list[dict[str, Any]]:
    """The reports of a pool's workers, or of all; `age_s` is seconds since the report."""
    return [_worker(row) for row in await connection.fetch(LIST, pool)]


def _worker(row: Any) -> dict[str, Any]:
    details = row["details"]
    adapters = details.get("adapters", {})
    return {
        "pool": row["pool"],
        "worker": row["worker"],
        "age_s": round(row["age_s"], 1),
        "state": _state(row),
        "lanes": details.get("lanes", []),
        "partitions": details.get("partitions", 0),
        "running": row["running"],
        "waiting": row["waiting"],
        "tokens_per_s": round(row["tokens_per_s"], 1),
        **{f"{tier}_adapters": adapters.get(tier, 0) for tier in TIERS},
        "started_at": row["started_at"],
    }


def _state(row: Any) -> str:
    if row["age_s"] > LIVE_S:
        return "silent"
    if not row["engine_ready"]:
        return "engine_down"
    return "saturated" if row["saturated"] else "ready"
