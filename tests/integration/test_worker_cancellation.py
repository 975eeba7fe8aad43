"""A cancelled job ends once, at every stage; a completion that is written first wins."""

import asyncio
import json
from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from schemas.control import Cancellation
from services.client.identifiers import uuid7
from services.client.signing import SIGNATURE_HEADER, signature
from services.process.settings import Settings
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.topics import recreate_topic
from tests.waiting import eventually


def quick(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"lease_s": 1.5, "max_batch_size": 4, "kafka_session_timeout_s": 6.0} | changes)


async def cancel(world: World, job_id: UUID) -> str:
    [row] = await world.rows("select loraq.cancel_job($1, $2) as found", TENANT, job_id)
    return str(row["found"])


async def send_cancellation(world: World, job_id: UUID, headers: list[tuple[str, bytes]] | None = None) -> None:
    """Produce a cancellation to the control topic."""
    value = Cancellation(tenant=TENANT, job_id=job_id).model_dump_json().encode()
    await world.producer.send_and_wait(world.settings.control_topic, value, key=TENANT.encode(), headers=headers or [])


async def send(world: World, job_id: UUID, **fields: Any) -> None:
    await world.send(job_request(**fields) | {"job_id": str(job_id)})


async def stored_cancellations(world: World) -> set[UUID]:
    return {row["job_id"] for row in await world.rows("select job_id from loraq.cancellations")}


async def events(world: World) -> Counter[tuple[UUID, str]]:
    rows = await world.rows("select job_id, type from loraq.outbox where kind = 'event'")
    return Counter((row["job_id"], row["type"]) for row in rows)


async def test_a_job_cancelled_before_it_arrives_never_runs(broker_settings: Settings) -> None:
    settings = quick(broker_settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        by_function, by_topic, good = uuid7(), uuid7(), uuid7()
        assert await cancel(world, by_function) == "unseen"
        await send_cancellation(world, by_topic)
        await world.producer.send_and_wait(settings.control_topic, b"not a cancellation")
        await eventually(lambda: stored_cancellations(world), what="the worker to read it")
        await eventually(lambda: are_stored(world, by_function, by_topic), what="both to be stored")
        for job_id in (by_function, by_topic, good):
            await send(world, job_id)
        rows = await world.ended(by_function, by_topic, good)
        assert [(row["state"], row["error_code"], row["attempts"]) for row in rows] == [
            ("cancelled", "cancelled", 0),
            ("cancelled", "cancelled", 0),
            ("succeeded", None, 1),
        ]
        assert set(await world.results()) == {good}
        assert await events(world) == {
            (by_function, "job.cancelled"): 1,
            (by_topic, "job.cancelled"): 1,
            (good, "job.succeeded"): 1,
        }
        await eventually(lambda: caught_up(world), what="every offset to be committed")


async def are_stored(world: World, *job_ids: UUID) -> bool:
    return await stored_cancellations(world) == set(job_ids)


async def caught_up(world: World) -> bool:
    return await world.lag() == 0


async def test_a_running_job_and_a_waiting_one_are_cancelled(settings: Settings) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        capacity = 5
        running = [uuid7() for _ in range(capacity)]
        for job_id in running:
            await send(world, job_id, prompt="wait")
        await eventually(lambda: num_in_state(world, "running", capacity), what="the batch to be full")
        behind = [uuid7(), uuid7()]
        for job_id in behind:
            await send(world, job_id)
        await eventually(lambda: num_in_state(world, "queued", 2), what="two to wait behind it")
        assert [await cancel(world, behind[0]), await cancel(world, running[0])] == ["queued", "running"]
        rows = await world.ended(behind[0], running[0], behind[1])
        assert [row["state"] for row in rows] == ["cancelled", "cancelled", "succeeded"]
        for job_id in running[1:]:
            await send_cancellation(world, job_id)
        assert {row["state"] for row in await world.ended(*running)} == {"cancelled"}
        assert set((await events(world)).values()) == {1}
        await eventually(lambda: caught_up(world), what="every offset to be committed")


async def num_in_state(world: World, state: str, count: int) -> bool:
    return Counter(row["state"] for row in (await world.jobs()).values())[state] == count


async def test_a_cancellation_that_races_completion_gives_one_outcome_and_one_event(settings: Settings) -> None:
    settings = quick(settings, max_batch_size=32, poll_interval_s=0.02)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        job_ids = [uuid7() for _ in range(300)]
        for start in range(0, len(job_ids), 20):
            batch = job_ids[start : start + 20]
            await asyncio.gather(
                *(send(world, job_id) for job_id in batch), *(cancel(world, job_id) for job_id in batch)
            )
        rows = await world.ended(*job_ids)
        states = Counter(row["state"] for row in rows)
        assert set(states) <= {"succeeded", "cancelled"}
        assert states["cancelled"]
        by_state = {(row["job_id"], f"job.{row['state']}"): 1 for row in rows}
        assert await events(world) == by_state
        assert set(await world.results()) == {row["job_id"] for row in rows if row["state"] == "succeeded"}


async def test_with_required_signatures_an_unsigned_cancellation_is_skipped(settings: Settings) -> None:
    settings = quick(settings, require_signed_jobs=True)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        unsigned, forged, signed = uuid7(), uuid7(), uuid7()
        await send_cancellation(world, unsigned)
        await send_cancellation(world, forged, [(SIGNATURE_HEADER, b"00")])
        value = Cancellation(tenant=TENANT, job_id=signed).model_dump_json().encode()
        header = signature(world.producer_key.encode(), value).encode()
        await send_cancellation(world, signed, [(SIGNATURE_HEADER, header)])
        await eventually(lambda: stored_cancellations(world), what="the signed one to be stored")
        assert await stored_cancellations(world) == {signed}


async def test_a_recreated_control_topic_is_read_from_its_beginning(settings: Settings) -> None:
    """The old position is beyond the only record of the new topic."""
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        old, new = uuid7(), uuid7()
        await send_cancellation(world, old)
        await eventually(lambda: are_stored(world, old), what="the worker to read it")
        await recreate_topic(settings, settings.control_topic)
        await send_cancellation(world, new)
        await eventually(lambda: are_stored(world, old, new), what="the worker to read the other")


@pytest.mark.parametrize("value", [None, b"{}", json.dumps({"tenant": "acme", "job_id": "no"}).encode()])
async def test_an_invalid_control_record_does_not_block_the_next(settings: Settings, value: bytes | None) -> None:
    settings = quick(settings)
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        await world.producer.send_and_wait(settings.control_topic, value, key=b"acme")
        job_id = uuid7()
        await send_cancellation(world, job_id)
        await eventually(lambda: are_stored(world, job_id), what="the next one to be stored")
