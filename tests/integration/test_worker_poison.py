"""Records that no client of ours would send: each ends in the dead letters, and those behind it are served."""

import json

from confluent_kafka import Producer

from schemas.common import Lane
from services.settings import Settings
from tests.integration.workers import running_worker
from tests.integration.world import header, job_request, open_world
from tests.waiting import eventually

LONG_URL = "http://receiver.invalid/" + "".join(f"{number:05}" for number in range(1000))  # too long for an index row
POISON: list[tuple[bytes | None, bytes | None, str]] = [
    (None, None, "the record has no value"),
    (b"squeezed", b" " * 20_000_000, "the value has 20000000 bytes"),
    (b"long url", json.dumps(job_request(webhook={"url": LONG_URL})).encode(), "field 'webhook.url'"),
]


async def test_no_record_stops_the_worker_or_what_stands_behind_it(settings: Settings) -> None:
    topic = settings.jobs_topic(Lane.STANDARD)
    async with open_world(settings) as world, running_worker(settings) as life:
        produce_compressed(settings.kafka_bootstrap, topic)
        behind = await world.send(job_request(), partition=0)
        dead = {record.key: record for record in await world.dead_letters(len(POISON))}

        async def caught_up() -> bool:
            return await world.lag() == 0

        await eventually(caught_up, what="every offset to be committed")
        assert behind.partition == 0
        assert life.failure is None
        assert [row["state"] for row in (await world.jobs()).values()] == ["succeeded"]
    for key, _, sentence in POISON:
        assert sentence in header(dead[key], "loraq-error-message")


def produce_compressed(bootstrap: str, topic: str) -> None:
    """All to one partition, squeezed by the client as far as the broker takes it."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "compression.type": "gzip", "message.max.bytes": 100_000_000, "linger.ms": 0}
    )
    for key, value, _ in POISON:
        producer.produce(topic, value, key=key, partition=0)
    assert producer.flush(30.0) == 0
