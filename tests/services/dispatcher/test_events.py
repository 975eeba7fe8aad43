"""Events on Kafka: on the embedded broker, one test on Apache Kafka as well."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from aiokafka import AIOKafkaConsumer

from services.kafka.clients import client_options
from services.process.settings import Settings
from services.webhooks.receiver import WebhookReceiver
from tests.services.dispatcher.conftest import BODY, World, dispatching, make_world, quick
from tests.waiting import eventually

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def consuming(settings: Settings) -> AsyncIterator[Any]:
    """A consumer of the whole events topic."""
    consumer = AIOKafkaConsumer(settings.events_topic, **client_options(settings), auto_offset_reset="earliest")
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def consume(consumer: Any, count: int) -> list[Any]:
    records: list[Any] = []

    async def check() -> bool:
        for batch in (await consumer.getmany(timeout_ms=200)).values():
            records.extend(batch)
        return len(records) >= count

    await eventually(check, timeout_s=60.0, what=f"{count} events")
    return records


async def job_of(world: World, event_id: UUID) -> str:
    return str(await world.database.fetchval("select job_id from loraq.outbox where event_id = $1", event_id))


async def done(world: World, count: int) -> None:
    statement = "select count(*) from loraq.outbox where kind = 'event' and state = 'done' and finished_at is not null"

    async def check() -> bool:
        return await world.database.fetchval(statement) == count

    await eventually(check, what=f"{count} events to be done")


async def test_events_are_keyed_by_job_and_carry_their_trace(broker_settings: Settings) -> None:
    settings = quick(broker_settings)
    async with make_world(settings) as world, dispatching(settings), consuming(settings) as consumer:
        first = await world.add("event", traceparent=TRACEPARENT)
        others = [await world.add("event", body=json.dumps({"number": number})) for number in range(20)]
        records = await consume(consumer, 21)
        await done(world, 21)
        by_key = {record.key.decode(): record for record in records}
        assert set(by_key) == {await job_of(world, event_id) for event_id in [first, *others]}
        record = by_key[await job_of(world, first)]
    assert record.value.decode() == BODY
    headers = dict(record.headers)
    assert headers["content-type"] == b"application/cloudevents+json; charset=UTF-8"
    assert headers["traceparent"].decode().split("-")[1] == TRACEPARENT.split("-")[1]


async def test_an_event_that_the_broker_rejects_ends_and_delays_no_other(world: World) -> None:
    async with dispatching(world.settings), consuming(world.settings) as consumer:
        too_large = await world.add("event", body="x" * 2_000_000)
        await world.add("event")
        await consume(consumer, 1)
        await done(world, 1)

        async def dead() -> bool:
            return await world.state(too_large) == "dead"

        await eventually(dead, what="the oversized event to be dead")


async def test_webhooks_continue_during_a_broker_outage_and_events_follow_after_it(world: World) -> None:
    unreachable = world.settings.model_copy(update={"kafka_bootstrap": "127.0.0.1:1"})
    async with WebhookReceiver(world.secret) as receiver, dispatching(unreachable) as life:
        event_id = await world.add("event")
        await world.add_webhook(receiver.url)
        await receiver.wait_for(1)
        await eventually(lambda: "127.0.0.1:1" in life.health.reasons.get("events", ""), what="the reason")
    assert await world.state(event_id) == "pending"
    async with dispatching(world.settings) as life:
        await done(world, 1)
        assert life.health.ready is None
