"""A tenant's limits on a worker: jobs over a limit wait in the database or are refused, and hold up no other tenant."""

from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from schemas.common import OverLimit
from services.client.identifiers import uuid7
from services.postgres.pool import transaction
from services.process.settings import Settings
from services.tenants.limits import change_limits
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OTHER = "globex"
PARTITION = 0


def quick(settings: Settings, **changes: object) -> Settings:
    defaults = {"max_batch_size": 8, "max_backlog_jobs": 24, "park_after_s": 0.5, "kafka_session_timeout_s": 6.0}
    return settings.model_copy(update=defaults | changes)


async def limit(world: World, *clear: str, **changes: Any) -> None:
    async with transaction(world.pool) as connection:
        await change_limits(connection, TENANT, changes, clear)


async def send(world: World, **fields: Any) -> UUID:
    """All records are in one partition, so that a job that held up its successors would show."""
    job_id = uuid7()
    await world.send(job_request(**fields) | {"job_id": str(job_id)}, partition=PARTITION)
    return job_id


async def add_other(world: World) -> None:
    async with transaction(world.pool) as connection:
        await add_tenant(connection, SecretBox(world.settings.secret_key), OTHER)


async def states(world: World, *job_ids: UUID) -> Counter[str]:
    rows = await world.jobs()
    return Counter(rows[job_id]["state"] for job_id in job_ids if job_id in rows)


async def check_one_event_each(world: World, job_ids: list[UUID]) -> None:
    rows = await world.rows("select job_id from loraq.outbox where kind = 'event'")
    assert Counter(row["job_id"] for row in rows) == dict.fromkeys(job_ids, 1)


async def test_a_flood_over_the_limit_waits_in_the_database_and_holds_up_no_other(settings: Settings) -> None:
    settings = quick(settings, lease_s=1.5)
    async with open_world(settings) as world:
        await add_other(world)
        await limit(world, running=1)
        async with running_worker(settings, FAULTY_ENGINE):
            first = await send(world, prompt="wait")
            await eventually(lambda: _is(states(world, first), running=1), what="the first job to run")
            flood = [await send(world) for _ in range(60)]
            behind = await send(world, tenant=OTHER)
            [row] = await world.ended(behind)
            assert row["state"] == "succeeded"
            await eventually(lambda: _is(states(world, *flood), parked=60), what="the flood to be parked")
            assert await reasons(world) == {"limit": 60}
            await world.rows("select loraq.cancel_job($1, $2)", TENANT, first)
            rows = await world.ended(first, *flood)
            assert Counter(row["state"] for row in rows) == {"cancelled": 1, "succeeded": 60}
            await check_one_event_each(world, [first, *flood, behind])
            await eventually(lambda: _none_parked(world), what="their requests to be deleted")
            await eventually(lambda: _caught_up(world), what="every offset to be committed")


async def test_jobs_parked_for_a_limit_outlive_their_worker_and_follow_a_change_of_the_limit(
    settings: Settings,
) -> None:
    settings = quick(settings, lease_s=1.5)
    async with open_world(settings) as world:
        await limit(world, running=0)
        async with running_worker(settings, FAULTY_ENGINE):
            jobs = [await send(world) for _ in range(30)]
            await eventually(lambda: _is(states(world, *jobs), parked=30), what="the jobs to be parked")
        async with running_worker(settings, FAULTY_ENGINE):
            await eventually(lambda: _caught_up(world), what="every offset to be committed")
            assert await states(world, *jobs) == {"parked": 30}
            await limit(world, running=2)
            assert {row["state"] for row in await world.ended(*jobs)} == {"succeeded"}
            await limit(world, "running")
            assert (await world.ended(await send(world)))[0]["state"] == "succeeded"


async def test_a_parked_job_over_its_limit_ends_at_its_cancellation_or_deadline(settings: Settings) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        await limit(world, running=0)
        unwanted = await send(world)
        await eventually(lambda: _is(states(world, unwanted), parked=1), what="the job to be parked")
        [row] = await world.rows("select clock_timestamp() + interval '2 seconds' as deadline")
        late = await send(world, deadline=row["deadline"].isoformat())
        await world.rows("select loraq.cancel_job($1, $2)", TENANT, unwanted)
        rows = await world.ended(unwanted, late)
        assert [(row["state"], row["attempts"]) for row in rows] == [("cancelled", 0), ("expired", 0)]


async def test_a_tenant_that_refuses_fails_jobs_that_cannot_run_soon(settings: Settings) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        await limit(world, running=1, over_limit=OverLimit.REFUSE)
        first = await send(world, prompt="wait")
        await eventually(lambda: _is(states(world, first), running=1), what="the first job to run")
        [row] = await world.ended(await send(world))
        assert (row["state"], row["error_code"], row["attempts"]) == ("failed", "limit_exceeded", 0)
        assert "its limit of 1 running jobs" in row["error_message"]
        await limit(world, queued=2)
        rows = await world.ended(*[await send(world) for _ in range(6)])
        assert {row["error_code"] for row in rows} == {"limit_exceeded"}
        assert any("its limit of 2 queued jobs" in row["error_message"] for row in rows)
        await world.rows("select loraq.cancel_job($1, $2)", TENANT, first)
        await world.ended(first)


async def test_tokens_per_second_are_limited(settings: Settings) -> None:
    settings = quick(settings)
    request: dict[str, Any] = {"prompt_token_ids": list(range(10)), "prompt": None, "sampling": {"max_tokens": 10}}
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        await limit(world, tokens_per_s=100.0, burst=100.0)
        jobs = [await send(world, **request) for _ in range(30)]
        rows = await world.ended(*jobs)
        assert {row["state"] for row in rows} == {"succeeded"}
        ends = sorted(row["finished_at"] for row in rows)
        seconds = (ends[-1] - ends[0]).total_seconds()
        assert seconds > (30 * 20 - 100 - 20) / 100 - 0.5, "600 tokens at 100 a second after a burst of 100"


async def _is(counts: Any, **expected: int) -> bool:
    return dict(await counts) == expected


async def _caught_up(world: World) -> bool:
    return await world.lag() == 0


async def _none_parked(world: World) -> bool:
    return not await world.rows("select from loraq.parked_jobs")


async def reasons(world: World) -> dict[str, int]:
    rows = await world.rows("select reason, count(*) from loraq.parked_jobs group by reason")
    return {row["reason"]: row["count"] for row in rows}
