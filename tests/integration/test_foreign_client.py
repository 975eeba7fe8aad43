"""Third-party clients, librdkafka and standardwebhooks, work as docs/clients.md shows."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import KafkaError, Message, Producer
from standardwebhooks import Webhook

from schemas.common import Lane
from services.client.identifiers import uuid7
from services.process.settings import Settings
from services.tenants.secrets import new_webhook_secret
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, job_request, open_world

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
PRODUCING, SENDING, READING, _, VERIFYING = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KEYS = [f"acme/adapter-{number}" for number in range(12)]


async def test_jobs_from_librdkafka_are_served_and_use_the_same_partitions_as_ours(broker_settings: Settings) -> None:
    topic = broker_settings.jobs_topic(Lane.STANDARD)
    async with open_world(broker_settings) as world, running_worker(broker_settings):
        requests = {key: job_request(job_id=str(uuid7())) for key in KEYS}
        theirs = produce_with_librdkafka(broker_settings.kafka_bootstrap, topic, requests)
        rows = await world.ended(*(UUID(request["job_id"]) for request in requests.values()))
        ours = {key: (await world.send(job_request(), key=key.encode())).partition for key in KEYS}
    assert {row["state"] for row in rows} == {"succeeded"}
    assert theirs == ours
    assert len(set(ours.values())) > 1


async def test_a_job_produced_as_on_the_page_gets_a_row(settings: Settings) -> None:
    assert f'"tenant": "{TENANT}"' in PRODUCING
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world, running_worker(settings):
        code = PRODUCING.replace("loraq.default.jobs.standard", settings.jobs_topic(Lane.STANDARD))
        names: dict[str, Any] = {"bootstrap": settings.kafka_bootstrap, "producer_key": world.producer_key}
        exec(code, names)  # noqa: S102  # the page's own code
        await world.ended(UUID(names["job"]["job_id"]))


async def test_a_job_is_sent_and_its_row_read_as_on_the_page(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("services.process.settings.load_settings", lambda: settings)
    names: dict[str, Any] = {}
    exec(SENDING + READING, names)  # noqa: S102  # the page's own code
    async with open_world(settings) as world, running_worker(settings):
        await world.add_adapter(lora_adapter(tmp_path / "mine", tiny_llama(tmp_path / "base")), "my-adapter")
        job_id = await names["submit"]("hello")
        row = await names["result"](settings.database_url.get_secret_value(), TENANT, job_id)
    assert row["state"] == "succeeded"
    assert row["output_text"]


def test_a_webhook_is_verified_as_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    secret, now = new_webhook_secret(), datetime.now(UTC)
    body = '{"type": "job.succeeded", "data": {"job_id": "j", "output_text": "hello"}}'
    headers = {
        "webhook-id": "e",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign("e", now, body),
    }
    exec(VERIFYING, {"webhook_secret": secret, "body": body.encode(), "headers": headers})  # noqa: S102
    assert capsys.readouterr().out == "job.succeeded j hello\n"


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
