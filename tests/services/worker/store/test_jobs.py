"""The worker's writes on a real database: jobs are claimed and started at once, released, and completed once."""

from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from schemas.common import ErrorCode, JobState, Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.postgres.pool import Pool, open_pool
from services.process.settings import Settings
from services.worker.engine.protocol import Finished
from services.worker.jobs import Candidate, Job, JobKey, Outcome, Record, failed
from services.worker.offsets.ledger import Partition, Place
from services.worker.store.decisions import Claimed, Conflict, Ended, Leased
from services.worker.store.effects import completion
from services.worker.store.jobs import JobStore
from tests.waiting import eventually


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with open_pool(settings) as opened:
        yield opened


def store_of(pool: Pool, *, lease_s: float = 30.0) -> JobStore:
    return JobStore(pool, pool_name="default", worker="w", lease_s=lease_s, max_attempts=3)


def candidate(offset: int, *, fingerprint: bytes = b"f" * 32, **fields: Any) -> Candidate:
    request = JobRequest(job_id=uuid7(), tenant="acme", prompt="hello", **fields)
    assert request.job_id is not None
    record = Record(Place(Partition("t", 0), offset), Lane.STANDARD, None, b"{}", (), 0)
    return Candidate(JobKey("acme", request.job_id), request, fingerprint, record, None, 1.0, 1)


def job_of(claimed: object, candidate: Candidate) -> Job:
    assert isinstance(claimed, Claimed)
    job = Job(candidate, claimed.claim, 1.0, [candidate.record.place], attempts=claimed.claim.attempts)
    job.counted = claimed.counted
    return job


def done(job: Job, tokens: tuple[int, ...]) -> Outcome:
    return Outcome(
        job, JobState.SUCCEEDED, finished=Finished("1", tokens, "t", "stop", 2, 0, len(tokens), None, 0.1, 1, 2)
    )


async def rows(pool: Pool, table: str) -> dict[Any, dict[str, Any]]:
    found = await pool.fetch(f"select * from loraq.{table}")  # noqa: S608  # a table of ours
    assert len({row["job_id"] for row in found}) == len(found)
    return {row["job_id"]: dict(row) for row in found}


async def test_jobs_that_fit_are_claimed_and_started_in_one_write(pool: Pool) -> None:
    candidates = [candidate(offset) for offset in range(4)]
    candidates[1] = candidate(1, deadline=datetime.now(UTC) + timedelta(hours=1))
    room = iter(range(2))
    decisions = await store_of(pool).accept(candidates, lambda _tenant, _adapter: next(room, None) is not None)
    jobs = [job_of(decision, each) for decision, each in zip(decisions, candidates, strict=True)]
    assert [job.counted for job in jobs] == [True, False, True, False], "a job with a deadline is only claimed"
    assert [job.attempts for job in jobs] == [0, 0, 0, 0]
    found = await rows(pool, "jobs")
    written = [found[job.key.job_id] for job in jobs]
    assert [row["state"] for row in written] == ["running", "queued", "running", "queued"]
    assert [row["attempts"] for row in written] == [1, 0, 1, 0]
    assert [row["started_at"] is not None for row in written] == [True, False, True, False]


async def test_releasing_a_job_uncounts_an_attempt_that_did_not_run(pool: Pool) -> None:
    store, wanted = store_of(pool), [candidate(0), candidate(1)]
    jobs = [
        job_of(claimed, each)
        for claimed, each in zip(await store.accept(wanted, lambda _tenant, _adapter: True), wanted, strict=True)
    ]
    jobs[1].attempts, jobs[1].counted = 1, False
    await store.release(jobs)
    found = await rows(pool, "jobs")
    assert [found[job.key.job_id]["attempts"] for job in jobs] == [0, 1]
    assert {row["state"] for row in found.values()} == {"queued"}


async def test_known_jobs_are_distinguished_from_new_ones(pool: Pool) -> None:
    store = store_of(pool)
    first, second, third = candidate(0), candidate(1), candidate(2)
    claimed = await store.accept([first, second])
    finished = job_of(claimed[0], first)
    assert await store.complete([completion(done(finished, (5, 6)), "default", 2.0)]) == {first.key}
    other = second._replace(fingerprint=b"o" * 32)
    assert isinstance((await store.accept([other]))[0], Conflict)
    ended, leased, fresh = await store.accept([first, second, third])
    assert isinstance(ended, Ended)
    assert isinstance(leased, Leased)
    assert isinstance(fresh, Claimed)
    assert fresh.claim.fence == 1


async def test_a_job_whose_row_was_pruned_does_not_run_again(pool: Pool) -> None:
    store, wanted = store_of(pool), candidate(0)
    [claimed] = await store.accept([wanted])
    await store.complete([completion(done(job_of(claimed, wanted), (5,)), "default", 2.0)])
    for table in ("results", "jobs"):
        await pool.execute(f"delete from loraq.{table}")  # noqa: S608  # as retention does, by day
    [again, other] = await store.accept([wanted, candidate(1)])
    assert isinstance(again, Ended)
    assert isinstance(other, Claimed), "the other job is new"
    assert wanted.key.job_id not in await rows(pool, "jobs")


async def test_a_batch_without_any_output_is_written(pool: Pool) -> None:
    """Columns of nulls only are sent as empty arrays."""
    store, wanted = store_of(pool), [candidate(0), candidate(1)]
    jobs = [job_of(claimed, each) for claimed, each in zip(await store.accept(wanted), wanted, strict=True)]
    ended = [completion(failed(job, ErrorCode.TIMEOUT, "too long"), "default", 2.0) for job in jobs]
    assert await store.complete(ended) == {job.key for job in jobs}
    found = await rows(pool, "jobs")
    assert {(row["state"], row["error_code"], row["adapter"]) for row in found.values()} == {
        ("failed", "timeout", None)
    }
    assert not await rows(pool, "results")
    assert (await rows(pool, "outbox")).keys() == found.keys()


async def test_each_result_has_its_own_tokens_and_a_stale_one_is_not_written(pool: Pool) -> None:
    store = store_of(pool, lease_s=0.001)
    wanted = [candidate(offset) for offset in range(4)]
    jobs = [job_of(claimed, each) for claimed, each in zip(await store.accept(wanted), wanted, strict=True)]
    [again] = await store.accept([wanted[2]])
    assert isinstance(again, Claimed), "its lease has expired"
    assert again.claim.fence == 2
    tokens: list[tuple[int, ...]] = [(1, 2, 3), (), (7,), (2**31 - 1, 0)]
    completions = [completion(done(job, each), "default", 2.0) for job, each in zip(jobs, tokens, strict=True)]
    assert await store.complete(completions) == {jobs[0].key, jobs[1].key, jobs[3].key}
    found = await rows(pool, "results")
    assert {job_id: tuple(row["output_token_ids"]) for job_id, row in found.items()} == {
        jobs[0].key.job_id: (1, 2, 3),
        jobs[1].key.job_id: (),
        jobs[3].key.job_id: (2**31 - 1, 0),
    }
    assert (await rows(pool, "outbox")).keys() == found.keys()
    used = "select jobs, completion_tokens, wasted_tokens from loraq.usage_hourly"
    assert [tuple(row) for row in await pool.fetch(used)] == [(3, 5, 1)]
    effects = await rows(pool, "outbox")
    assert await store.complete(completions) == {jobs[0].key, jobs[1].key, jobs[3].key}, "a repeat returns the same"
    assert [tuple(row) for row in await pool.fetch(used)] == [(3, 5, 1)]
    assert (await rows(pool, "outbox"), await rows(pool, "results")) == (effects, found)


async def test_a_write_repeated_after_a_lost_reply_counts_once(pool: Pool) -> None:
    store, wanted = store_of(pool), [candidate(0), candidate(1)]
    jobs = [job_of(claimed, each) for claimed, each in zip(await store.accept(wanted), wanted, strict=True)]
    first, again = await store.start(jobs), await store.start(jobs)
    assert first == again == dict.fromkeys((job.key for job in jobs), 1)
    for _ in range(2):
        await store.release(jobs)
    assert [row["attempts"] for row in (await rows(pool, "jobs")).values()] == [0, 0]


async def test_the_database_rejects_a_second_effect_of_a_job(pool: Pool) -> None:
    statement = (
        "insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body) select gen_random_uuid(), 'event',"
        " 'acme', $1, 'p', 'job.succeeded', '{}' on conflict do nothing"
    )
    job_id = uuid7()
    assert [await pool.execute(statement, job_id) for _ in range(2)] == ["INSERT 0 1", "INSERT 0 0"]


async def _is(awaited: Awaitable[object], expected: object) -> bool:
    return await awaited == expected


async def test_a_new_version_of_a_job_touches_no_index(pool: Pool) -> None:
    """Its page has room, and no index covers a column that changes."""
    store, wanted = store_of(pool), [candidate(offset) for offset in range(200)]
    async with pool.acquire() as connection:
        await connection.execute("select pg_stat_reset()")
    jobs = [job_of(claimed, each) for claimed, each in zip(await store.accept(wanted), wanted, strict=True)]
    await store.complete([completion(done(job, (1,)), "default", 2.0) for job in jobs])

    async def counted() -> tuple[int, int]:
        row = await pool.fetchrow(
            "select sum(n_tup_upd) as updated, sum(n_tup_hot_upd) as hot from pg_stat_user_tables"
            " where schemaname = 'loraq' and relname like 'jobs\\_%'"
        )
        assert row is not None
        return row["updated"], row["hot"]

    await eventually(lambda: _is(counted(), (200, 200)), what="two hundred updates without an index")
    blockers = await pool.fetch(
        "select indexdef from pg_indexes where schemaname = 'loraq' and tablename like 'jobs\\_%'"
        " and indexdef ~ '(state|attempts|started_at|finished_at|lease_until|worker|error_|fence)'"
    )
    assert blockers == []
    [options] = {
        row[0]
        for row in await pool.fetch(
            "select reloptions::text from pg_class where oid in"
            " (select inhrelid from pg_inherits where inhparent = 'loraq.jobs'::regclass)"
        )
    }
    assert options == "{fillfactor=50}"


async def test_invalid_tenant_names_are_not_looked_up(pool: Pool) -> None:
    assert await store_of(pool).tenants({"a\x00b", "\ud800", "A", ""}) == {}
