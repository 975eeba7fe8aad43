"""Jobs with a long wait are parked in the database: they block no other job, and none is forgotten."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from services.adapters.staging import Stager
from services.client.identifiers import uuid7
from services.process.settings import Settings
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Staging of adapters blocks until this is set."""
    opened = asyncio.Event()
    hold = Stager.hold

    @asynccontextmanager
    async def blocked_hold(self: Stager, *adapter: Any) -> AsyncIterator[Path]:
        await opened.wait()
        async with hold(self, *adapter) as path:
            yield path

    monkeypatch.setattr(Stager, "hold", blocked_hold)
    return opened


def quick(settings: Settings, **changes: object) -> Settings:
    defaults = {"lease_s": 1.5, "max_batch_size": 4, "kafka_session_timeout_s": 6.0, "park_after_s": 0.3}
    return settings.model_copy(update=defaults | changes)


@asynccontextmanager
async def world_with_adapter(settings: Settings, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(settings) as world:
        await world.add_adapter(lora_adapter(tmp_path / "slow", tiny_llama(tmp_path / "base")), "slow")
        yield world


async def send(world: World, *, partition: int = 0, **fields: Any) -> UUID:
    job_id = uuid7()
    await world.send(job_request(**fields) | {"job_id": str(job_id)}, partition=partition)
    return job_id


async def states(world: World) -> Counter[str]:
    return Counter(row["state"] for row in (await world.jobs()).values())


async def num_parked(world: World, count: int) -> bool:
    return (await states(world))["parked"] == count


async def is_parked(world: World, job_id: UUID) -> bool:
    return (await world.jobs()).get(job_id, {}).get("state") == "parked"


async def none_is_parked(world: World) -> bool:
    return not await world.rows("select from loraq.parked_jobs")


async def caught_up(world: World) -> bool:
    return await world.lag() == 0


async def check_one_event_each(world: World, job_ids: list[UUID]) -> None:
    rows = await world.rows("select job_id from loraq.outbox where kind = 'event'")
    assert Counter(row["job_id"] for row in rows) == dict.fromkeys(job_ids, 1)


async def test_a_flood_for_a_slow_adapter_blocks_nothing_and_survives_its_worker(
    broker_settings: Settings, tmp_path: Path, door: asyncio.Event
) -> None:
    settings = quick(broker_settings, max_backlog_jobs=12, host_cache_bytes=2**30)
    async with world_with_adapter(settings, tmp_path) as world:
        async with running_worker(settings, FAULTY_ENGINE):
            flood = [await send(world, adapter="slow") for _ in range(20)]
            behind = await send(world)
            [row] = await world.ended(behind)
            assert row["state"] == "succeeded"
            await eventually(lambda: num_parked(world, len(flood)), what="the flood to be parked")
            await eventually(lambda: caught_up(world), what="every offset to be committed")
        door.set()
        async with running_worker(settings, FAULTY_ENGINE):
            rows = await world.ended(*flood)
            assert {(row["state"], row["attempts"]) for row in rows} == {("succeeded", 1)}
            await eventually(lambda: none_is_parked(world), what="their requests to be deleted")
        await check_one_event_each(world, [*flood, behind])


async def test_a_parked_job_ends_at_its_deadline_or_cancellation(
    settings: Settings, tmp_path: Path, door: asyncio.Event
) -> None:
    settings = quick(settings, adapter_load_timeout_s=20.0, host_cache_bytes=2**30)
    deadline = (datetime.now(UTC) + timedelta(seconds=4)).isoformat()
    async with world_with_adapter(settings, tmp_path) as world, running_worker(settings, FAULTY_ENGINE):
        late, unwanted = await send(world, adapter="slow", deadline=deadline), await send(world, adapter="slow")
        await eventually(lambda: is_parked(world, unwanted), what="the second to be parked")
        await world.rows("select loraq.cancel_job($1, $2)", TENANT, unwanted)
        rows = await world.ended(late, unwanted)
        assert [(row["state"], row["attempts"]) for row in rows] == [("expired", 0), ("cancelled", 0)]
        await check_one_event_each(world, [late, unwanted])
        assert not door.is_set()


async def test_an_adapter_that_never_loads_fails_its_parked_jobs(
    settings: Settings, tmp_path: Path, door: asyncio.Event
) -> None:
    settings = quick(settings, adapter_load_timeout_s=1.5, host_cache_bytes=2**30)
    async with world_with_adapter(settings, tmp_path) as world, running_worker(settings, FAULTY_ENGINE):
        [row] = await world.ended(await send(world, adapter="slow"))
        assert (row["state"], row["error_code"]) == ("failed", "adapter_load_timeout")
        assert not door.is_set()


async def test_a_delivery_of_a_job_that_runs_elsewhere_is_parked_until_it_ends(
    broker_settings: Settings,
) -> None:
    settings = quick(broker_settings)
    one, other = (settings.model_copy(update={"worker_id": name}) for name in ("one", "other"))
    async with (
        open_world(settings) as world,
        running_worker(one, FAULTY_ENGINE),
        running_worker(other, FAULTY_ENGINE),
    ):
        job_id = uuid7()
        request = job_request(prompt="wait") | {"job_id": str(job_id)}
        for partition in range(settings.partitions):
            await world.send(request, partition=partition)
        [row] = await eventually(
            lambda: world.rows("select reason from loraq.parked_jobs where job_id = $1", job_id),
            what="the delivery at the other worker to be parked",
        )
        assert row["reason"] == "lease"
        await world.rows("select loraq.cancel_job($1, $2)", TENANT, job_id)
        [row] = await world.ended(job_id)
        assert (row["state"], row["attempts"]) == ("cancelled", 1)
        await eventually(lambda: none_is_parked(world), what="the request to be deleted")
        await eventually(lambda: caught_up(world), what="every offset to be committed")
        await check_one_event_each(world, [job_id])


async def test_a_retry_waits_in_the_database_and_blocks_no_other_job(settings: Settings) -> None:
    settings = quick(settings, max_attempts=2, retry_delay_s=2.0)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        failing = await send(world, prompt="fail")
        await eventually(lambda: num_parked(world, 1), what="its retry to be parked")
        await eventually(lambda: caught_up(world), what="its offset to be committed")
        [row] = await world.ended(failing)
        assert (row["error_code"], row["attempts"]) == ("engine_error", 2)
        await check_one_event_each(world, [failing])
