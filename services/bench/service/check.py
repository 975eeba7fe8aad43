"""Reads the outcomes of the jobs from the database after a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from services.bench.service.bench_pool import BenchPool
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
    """A terminal job row and the transaction that wrote it."""

    job_id: UUID
    written_by: int
    accepted_at: datetime
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lost`: sent jobs that are not terminal or have no event. `duplicates`: anything beyond one per job."""

    rows: int
    lost: int
    duplicates: int
    results: int
    outbox_rows: int
    usage_jobs: int


async def progress(bench: BenchPool) -> int:
    """The number of jobs whose usage is counted, which happens in the transaction of their rows."""
    with translated("read the benchmark's progress"):
        return int(await bench.database.fetchval(PROGRESS, list(bench.tenants)))


async def database_cpu_s(bench: BenchPool) -> float:
    """CPU seconds of the database server's current processes; 0 if the server is on another machine."""
    rows = await bench.database.fetch(SERVER_PROCESSES)
    costs = [cost_of(row["pid"]) for row in rows if "postgres" in name_of(row["pid"])]
    return sum(cost.cpu_s for cost in costs)


async def terminal_rows(bench: BenchPool) -> list[Row]:
    """All terminal rows of the run."""
    with translated("read the benchmark's rows"):
        rows = await bench.database.fetch(TERMINAL, list(bench.tenants), timeout=120.0)
    return [Row(**row) for row in rows]


async def verdict(bench: BenchPool, sent: Iterable[UUID], rows: list[Row]) -> Verdict:
    """Compare the sent jobs with the rows in the database."""
    with translated("count the benchmark's rows"):
        effects = await bench.database.fetchrow(EFFECTS, list(bench.tenants), timeout=120.0)
    assert effects is not None
    ended = {row.job_id for row in rows}
    missing = sum(1 for job_id in sent if job_id not in ended)
    usage_jobs = await progress(bench)
    twice = (
        len(rows) - len(ended) + effects["results"] - effects["with_result"] + effects["effects"]
        - effects["with_effect"] + max(0, usage_jobs - effects["results"])
    )  # fmt: skip
    without_event = len(ended) - effects["with_effect"]
    return Verdict(len(rows), missing + without_event, twice, effects["results"], effects["effects"], usage_jobs)
