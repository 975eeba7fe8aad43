"""What became of the jobs, read back from the tables after the run."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from services.bench.service.bench_pool import Place
from services.bench.service.processes import cost_of, name_of
from services.postgres.pool import translated

PROGRESS = "select coalesce(sum(jobs), 0)::bigint from loraq.usage_hourly where tenant = any($1::text[])"
TERMINAL = """
select job_id, xmin::text::bigint as written_by, accepted_at, finished_at
from loraq.jobs
where tenant = any($1::text[]) and state in ('succeeded', 'failed', 'cancelled', 'expired')
"""
EFFECTS = """
select (select count(*) from loraq.results where tenant = any($1::text[])) as results,
       (select count(distinct job_id) from loraq.results where tenant = any($1::text[])) as with_result,
       (select count(*) from loraq.outbox where tenant = any($1::text[])) as effects,
       (select count(distinct job_id) from loraq.outbox where tenant = any($1::text[])) as with_effect
"""
SERVER_PROCESSES = "select pid from pg_stat_activity"


@dataclass(frozen=True, slots=True)
class Row:
    """A terminal row and the transaction that wrote it."""

    job_id: UUID
    written_by: int
    accepted_at: datetime
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lost`: sent and not terminal, or without its event. `duplicates`: whatever is there beyond one per job."""

    rows: int
    lost: int
    duplicates: int
    results: int
    outbox_rows: int
    usage_jobs: int


async def progress(place: Place) -> int:
    """Jobs whose usage is counted: it is in the same transaction as their rows."""
    with translated("read the benchmark's progress"):
        return int(await place.database.fetchval(PROGRESS, list(place.tenants)))


async def database_cpu_s(place: Place) -> float:
    """CPU seconds of the server's processes that run now; 0 where the server is on another machine."""
    rows = await place.database.fetch(SERVER_PROCESSES)
    costs = [cost_of(row["pid"]) for row in rows if "postgres" in name_of(row["pid"])]
    return sum(cost.cpu_s for cost in costs)


async def terminal_rows(place: Place) -> list[Row]:
    """Every terminal row of the run."""
    with translated("read the benchmark's rows"):
        rows = await place.database.fetch(TERMINAL, list(place.tenants), timeout=120.0)
    return [Row(**row) for row in rows]


async def verdict(place: Place, sent: Iterable[UUID], rows: list[Row]) -> Verdict:
    """Compare what was sent with what is there."""
    with translated("count the benchmark's rows"):
        effects = await place.database.fetchrow(EFFECTS, list(place.tenants), timeout=120.0)
    assert effects is not None
    ended = {row.job_id for row in rows}
    missing = sum(1 for job_id in sent if job_id not in ended)
    usage_jobs = await progress(place)
    twice = (
        len(rows) - len(ended) + effects["results"] - effects["with_result"] + effects["effects"]
        - effects["with_effect"] + max(0, usage_jobs - effects["results"])
    )  # fmt: skip
    without_event = len(ended) - effects["with_effect"]
    return Verdict(len(rows), missing + without_event, twice, effects["results"], effects["effects"], usage_jobs)
