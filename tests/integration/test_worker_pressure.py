"""A flood in one lane fills only its share of memory and does not block other lanes."""

import asyncio

from schemas.common import Lane
from services.process import telemetry
from services.process.settings import Settings
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import World, open_world
from tests.waiting import eventually

FLOOD = 400


async def test_a_flood_of_batch_jobs_leaves_room_for_an_interactive_one(settings: Settings) -> None:
    settings = settings.model_copy(update={"max_backlog_jobs": 60, "max_batch_size": 4})
    async with open_world(settings) as world:
        await asyncio.gather(*(world.send_job(lane=Lane.BATCH) for _ in range(FLOOD)))
        async with running_worker(settings, FAULTY_ENGINE):
            await eventually(lambda: telemetry.PARTITIONS_PAUSED._value.get() > 0, what="the batch lane to be paused")
            await world.ended(await world.send_job(lane=Lane.INTERACTIVE))
            assert await num_unfinished(world) <= 60
            assert await num_ended(world) < FLOOD / 2


async def num_unfinished(world: World) -> int:
    [row] = await world.rows("select count(*) from loraq.jobs where state in ('queued', 'running')")
    return int(row["count"])


async def num_ended(world: World) -> int:
    [row] = await world.rows("select count(*) from loraq.jobs where state = 'succeeded'")
    return int(row["count"])
