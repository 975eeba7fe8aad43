"""Records that our clients never send: each is dead-lettered, and the records behind it are served."""

import json

import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka import Producer

from schemas.common import Lane
from services.client.identifiers import uuid7
from services.client.producer import JobProducer
from services.process.settings import Settings
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, World, header, job_request, open_world
from tests.waiting import eventually

LONG_URL = "http://receiver.invalid/" + "".join(f"{number:05}" for number in range(1000))  # too long for an index row
POISON: list[tuple[bytes | None, bytes | None, str]] = [
    (None, None, "the record has no value"),
    (b"compressed", b" " * 20_000_000, "the value has 20000000 bytes"),
    (b"a\x00/b", b'{"tenant": "a\\u0000b", "prompt": "x"}', "field 'tenant'"),
    (b"long url", json.dumps(job_request(webhook={"url": LONG_URL})).encode(), "field 'webhook.url'"),
]


async def test_no_record_stops_the_worker_or_blocks_the_records_behind_it(settings: Settings) -> None:
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


async def test_a_header_name_that_is_not_utf_8_blocks_no_record(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", fetcher.MemoryRecords)  # put back afterwards
    topic = settings.jobs_topic(Lane.STANDARD)
    async with open_world(settings) as world, running_worker(settings) as life:
        before = [await world.send(job_request(), partition=number) for number in range(3)]
        await send_batch(world, topic, partition=1, header_names=["good", LatinName(), "good"])
        after = [await world.send(job_request(), partition=number) for number in range(3)]

        async def all_served() -> bool:
            states = [row["state"] for row in (await world.jobs()).values()]
            return states == ["succeeded"] * (len(before) + 3 + len(after)) and await world.lag() == 0

        await eventually(all_served, what="every record to be served")
        assert life.failure is None


async def test_a_header_name_that_is_not_utf_8_blocks_no_cancellation(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", fetcher.MemoryRecords)  # put back afterwards
    async with open_world(settings) as world, running_worker(settings) as life:
        await send_batch(world, settings.control_topic, partition=0, header_names=[LatinName()])
        job_id = uuid7()
        async with JobProducer.from_settings(settings) as producer:
            await producer.cancel(TENANT, job_id)

        async def is_stored() -> bool:
            return [row["job_id"] for row in await world.rows("select job_id from loraq.cancellations")] == [job_id]

        await eventually(is_stored, what="the cancellation to be stored")
        assert life.failure is None


class LatinName(str):
    """A header name from a client that does not use UTF-8."""

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xfc\xff"


async def send_batch(world: World, topic: str, partition: int, header_names: list[str]) -> None:
    """Send a hand-built batch of jobs with one header each; our clients cannot produce these."""
    built = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 1 << 20)
    for number, name in enumerate(header_names):
        value = json.dumps(job_request()).encode()
        built.append(number, timestamp=None, key=None, value=value, headers=[(name, b"x")])
    batch = world.producer.create_batch()
    batch._builder, batch._relative_offset = built, len(header_names)
    await (await world.producer.send_batch(batch, topic, partition=partition))


def produce_compressed(bootstrap: str, topic: str) -> None:
    """Produce all poison records to one partition, compressed by the client."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "compression.type": "gzip", "message.max.bytes": 100_000_000, "linger.ms": 0}
    )
    for key, value, _ in POISON:
        producer.produce(topic, value, key=key, partition=0)
    assert producer.flush(30.0) == 0
