"""Faults of a worker, its engine, its database or its group lose no job and duplicate none."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest

from services.localstack.servers import Postgres
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.worker.app import serve
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import World, open_world
from tests.processes import spawn
from tests.waiting import eventually

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 60, "ignore_eos": True}


def quick(settings: Settings, **changes: object) -> Settings:
    """Short leases, so that the jobs of a lost worker are claimed soon."""
    defaults = {
        "lease_s": 1.5,
        "max_batch_size": 8,
        "drain_s": 10.0,
        "dtype": "float32",
        "kafka_session_timeout_s": 6.0,
    }
    return settings.model_copy(update=defaults | changes)


async def num_ended(world: World) -> int:
    [row] = await world.rows("select count(*) from loraq.jobs where state in ('succeeded', 'failed', 'expired')")
    return int(row["count"])


async def check_once(world: World, job_ids: list[UUID], *, attempts: int) -> None:
    """Each job has one row, one result, one event and one webhook, and was counted once."""
    rows = await world.ended(*job_ids, timeout_s=90.0)
    assert {row["state"] for row in rows} == {"succeeded"}
    assert max(row["attempts"] for row in rows) <= attempts
    assert set(await world.results()) == set(job_ids)
    outbox = await world.rows("select job_id, kind from loraq.outbox")
    assert Counter(row["kind"] for row in outbox) == {"event": len(job_ids), "webhook": len(job_ids)}
    assert {row["job_id"] for row in outbox} == set(job_ids)
    [usage] = await world.rows("select sum(jobs) as jobs from loraq.usage_hourly")
    assert usage["jobs"] == len(job_ids)


async def test_a_worker_killed_during_a_run_loses_no_job_and_duplicates_no_row(
    broker_settings: Settings, tmp_path: Path
) -> None:
    base = tiny_llama(tmp_path / "tiny-llama")
    settings = quick(broker_settings, base_model=base)
    async with open_world(settings) as world:
        await world.add_adapter(lora_adapter(tmp_path / "pirate", base, rank=8), "pirate")
        with spawn(["worker"], settings) as first:
            job_ids = [
                await world.send_job(
                    adapter=("pirate", None)[number % 2], sampling=LONG, webhook={"url": "http://receiver.invalid/"}
                )
                for number in range(60)
            ]
            await eventually(lambda: started_and_ended(world), what="some jobs to have ended and others to run")
            first.kill()
        assert await num_ended(world) < len(job_ids)
        with spawn(["worker"], settings):
            await check_once(world, job_ids, attempts=2)
            await eventually(lambda: caught_up(world), what="every offset to be committed")


async def started_and_ended(world: World) -> bool:
    rows = await world.rows("select state, count(*) from loraq.jobs group by state")
    counts = {row["state"]: row["count"] for row in rows}
    return counts.get("succeeded", 0) > 0 and counts.get("running", 0) > 0


async def caught_up(world: World) -> bool:
    return await world.lag() == 0


async def test_workers_that_join_and_leave_share_the_jobs(broker_settings: Settings) -> None:
    settings = quick(broker_settings)
    async with open_world(settings) as world, running_worker(named(settings, "stays"), FAULTY_ENGINE):
        job_ids = await send_many(world, 150)
        async with running_worker(named(settings, "goes"), FAULTY_ENGINE):
            job_ids += await send_many(world, 150)
            await eventually(lambda: num_ended_by(world, "goes"), what="the second worker to take part")
        job_ids += await send_many(world, 30)
        await check_once(world, job_ids, attempts=2)
        await eventually(lambda: caught_up(world), what="every offset to be committed")


def named(settings: Settings, worker_id: str) -> Settings:
    return settings.model_copy(update={"worker_id": worker_id})


async def send_many(world: World, count: int) -> list[UUID]:
    sending = [world.send_job(webhook={"url": "http://receiver.invalid/"}) for _ in range(count)]
    return list(await asyncio.gather(*sending))


async def num_ended_by(world: World, worker: str) -> int:
    [row] = await world.rows("select count(*) from loraq.jobs where state = 'succeeded' and worker = $1", worker)
    return int(row["count"])


async def test_jobs_of_a_killed_engine_run_again(settings: Settings) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE) as life:
        job_ids = await send_many(world, 200)
        await eventually(lambda: num_ended(world), what="the first jobs to end")
        os.kill(engine_pid(), signal.SIGKILL)
        await eventually(lambda: life.health.ready is None, what="another engine to be ready")
        await check_once(world, job_ids, attempts=2)


def engine_pid() -> int:
    """The engine process of the one worker in this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    [pid] = [child for child, command in commands.items() if b"services.worker.engine.process" in command]
    return pid


@pytest.mark.parametrize("prompt", ["die", "crash"])
async def test_only_the_job_that_always_crashes_the_engine_fails(settings: Settings, prompt: str) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        killer = await world.send_job(prompt=prompt)
        neighbours = await send_many(world, 40)
        [row] = await world.ended(killer, timeout_s=150.0)
        rows = await world.ended(*neighbours)
    assert (row["state"], row["error_code"], row["attempts"]) == ("failed", "engine_error", 3)
    assert "LORAQ_MAX_ATTEMPTS" in row["error_message"]
    assert {(each["state"], each["attempts"]) for each in rows} == {("succeeded", 1)}


async def test_an_engine_error_fails_the_job_after_its_attempts(settings: Settings) -> None:
    settings = quick(settings, max_attempts=2)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        failing, refused, good = [await world.send_job(prompt=prompt) for prompt in ("fail", "refuse", "good")]
        rows = await world.ended(failing, refused, good)
    assert [row["error_code"] for row in rows] == ["engine_error", "invalid_message", None]
    assert [row["attempts"] for row in rows] == [2, 1, 1]
    assert "the engine cannot do this one" in rows[0]["error_message"]
    assert rows[1]["error_message"] == "the prompt cannot be used"


async def test_a_stopping_worker_finishes_running_jobs_and_releases_the_rest(settings: Settings) -> None:
    settings = quick(settings, lease_s=60.0)
    async with open_world(settings) as world:
        async with running_worker(settings, FAULTY_ENGINE):
            job_ids = await send_many(world, 200)
            await eventually(lambda: num_ended(world), what="the first jobs to end")
        states = Counter(row["state"] for row in (await world.jobs()).values())
        assert set(states) <= {"succeeded", "queued"}
        assert states["succeeded"] < len(job_ids)
        async with running_worker(settings, FAULTY_ENGINE):
            await check_once(world, job_ids, attempts=1)


async def test_a_job_interrupted_by_a_stop_is_not_charged_an_attempt(settings: Settings) -> None:
    settings = quick(settings, lease_s=60.0, drain_s=0.2)
    async with open_world(settings) as world:
        async with running_worker(settings, FAULTY_ENGINE):
            job_id = await world.send_job(prompt="hang")
            await eventually(lambda: is_running(world, job_id), what="the job to be in the engine")
        job = (await world.jobs())[job_id]
    assert (job["state"], job["attempts"]) == ("queued", 0)


async def is_running(world: World, job_id: UUID) -> bool:
    return (await world.jobs()).get(job_id, {}).get("state") == "running"


async def test_while_the_database_is_unreachable_no_job_is_lost_and_no_offset_is_committed(
    settings: Settings, postgres_server: Postgres
) -> None:
    settings = quick(settings, database_timeout_s=5.0)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE) as life:
        job_ids = await send_many(world, 100)
        await eventually(lambda: num_ended(world), what="the first jobs to end")
        try:
            postgres_server.stop()  # in this thread: the server ends with the thread that started it
            job_ids += await send_many(world, 100)
            await eventually(lambda: "database" in life.health.reasons, what="the worker to notice")
        finally:
            postgres_server.start()
        await check_once(world, job_ids, attempts=2)
        await eventually(lambda: life.health.ready is None, what="the worker to be ready again")


async def test_an_engine_that_cannot_start_ends_the_worker(settings: Settings) -> None:
    life = Lifecycle()
    async with open_world(quick(settings)):
        serving = asyncio.create_task(serve(life, quick(settings), "tests.integration.stub_engine:broken_engine"))
        await asyncio.wait_for(life.stop.wait(), 60.0)
        await serving
    assert "the engine cannot start: the model" in str(life.failure)
