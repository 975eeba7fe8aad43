"""Jobs from a client that is not ours, librdkafka, are served the same and stand in the same partitions."""

import json
from uuid import UUID

from confluent_kafka import KafkaError, Message, Producer

from schemas.common import Lane
from services.identifiers import uuid7
from services.settings import Settings
from tests.integration.workers import running_worker
from tests.integration.world import job_request, open_world

KEYS = [f"acme/adapter-{number}" for number in range(12)]


async def test_jobs_from_librdkafka_are_served_and_stand_where_ours_would(broker_settings: Settings) -> None:
    topic = broker_settings.jobs_topic(Lane.STANDARD)
    async with open_world(broker_settings) as world, running_worker(broker_settings):
        requests = {key: job_request(job_id=str(uuid7())) for key in KEYS}
        theirs = produce_with_librdkafka(broker_settings.kafka_bootstrap, topic, requests)
        rows = await world.ended(*(UUID(request["job_id"]) for request in requests.values()))
        ours = {key: (await world.send(job_request(), key=key.encode())).partition for key in KEYS}
    assert {row["state"] for row in rows} == {"succeeded"}
    assert theirs == ours
    assert len(set(ours.values())) > 1


def produce_with_librdkafka(bootstrap: str, topic: str, requests: dict[str, dict[str, object]]) -> dict[str, int]:
    """Produce a request under each key; returns the partition of each key."""
    partitions: dict[str, int] = {}

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        partitions[message.key().decode()] = message.partition()

    producer = Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random", "compression.type": "zstd"})
    for key, request in requests.items():
        producer.produce(topic, json.dumps(request).encode(), key=key, on_delivery=on_delivery)
    assert producer.flush(30.0) == 0
    return partitions
