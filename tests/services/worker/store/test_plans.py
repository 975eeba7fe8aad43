"""Query plans do not depend on statistics: a batch reads about as many rows as it has jobs."""

import pytest

from services.postgres.pool import Pool, open_pool
from services.process.settings import Settings
from services.worker.jobs import Job
from services.worker.store.effects import completion
from services.worker.store.jobs import JobStore
from tests.services.worker.store.test_jobs import candidate, done, job_of

BATCH = 250
ROWS_READ = r"""
select coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint
from pg_stat_user_tables
where schemaname = 'loraq' and relname ~ '^jobs_(\d|default)'
"""


@pytest.mark.parametrize("analyzed", ["empty", "ended"])
async def test_a_batch_reads_about_as_many_rows_as_it_has_jobs(settings: Settings, analyzed: str) -> None:
    """`empty`: a new day's partition. `ended`: at the last ANALYZE, no job was queued or running."""
    async with open_pool(settings.model_copy(update={"database_pool_size": 1}), fresh_plans=True) as pool:
        store = JobStore(pool, pool_name="default", worker="w", lease_s=30.0, max_attempts=3)
        if analyzed == "ended":
            for _ in range(4):
                await complete(store, await claim(store))
        await pool.execute("vacuum analyze loraq.jobs")
        for _ in range(8):  # more than the five after which a server may keep a plan
            await complete(store, await claim(store, 2))
        jobs = [await claim(store) for _ in range(16)]
        before = await rows_read(pool)
        for batch in jobs:
            assert len(await store.renew(batch)) == BATCH
            await complete(store, batch)
        assert await rows_read(pool) - before < 16 * BATCH * 6
        assert await pool.fetchval("select count(*) from loraq.jobs where state = 'succeeded'") >= 16 * BATCH


async def claim(store: JobStore, count: int = BATCH) -> list[Job]:
    candidates = [candidate(offset) for offset in range(count)]
    claimed = await store.accept(candidates, lambda _tenant, _adapter: True)
    return [job_of(each, candidate) for each, candidate in zip(claimed, candidates, strict=True)]


async def complete(store: JobStore, jobs: list[Job]) -> None:
    completions = [completion(done(job, (1, 2)), "default", 2.0) for job in jobs]
    assert len(await store.complete(completions)) == len(jobs)


async def rows_read(pool: Pool) -> int:
    """Rows of `jobs` fetched so far, by index or sequential scan; this session's counters are flushed first."""
    await pool.execute("select pg_stat_force_next_flush()")
    return int(await pool.fetchval(ROWS_READ))
