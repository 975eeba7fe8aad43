"""The Python producer: what it sends, and to which partition."""

import json
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from pydantic import SecretStr

from schemas.common import Lane
from schemas.job import JobRequest, Sampling
from services.client.producer import JobProducer, record_key
from services.client.signing import SIGNATURE_HEADER, signature
from services.errors import InputError, RetryableError
from services.kafka import clients as kafka
from services.process.settings import Settings
from tests.waiting import eventually

REQUEST = JobRequest(tenant="acme", adapter="support@3", prompt="hello", sampling=Sampling(max_tokens=4))


@pytest.fixture
async def topics(settings: Settings) -> Settings:
    await kafka.ensure_topics(settings)
    return settings


async def records(settings: Settings, lane: Lane, count: int) -> list[Any]:
    consumer = AIOKafkaConsumer(
        settings.jobs_topic(lane), auto_offset_reset="earliest", **kafka.client_options(settings)
    )
    await consumer.start()
    found: list[Any] = []

    async def enough() -> bool:
        for batch in (await consumer.getmany(timeout_ms=200)).values():
            found.extend(batch)
        return len(found) >= count

    try:
        await eventually(enough)
    finally:
        await consumer.stop()
    return found


def test_the_key_is_tenant_and_adapter_without_version() -> None:
    assert record_key(REQUEST) == b"acme/support"
    assert record_key(JobRequest(tenant="acme", prompt="hello")) is None


async def test_a_job_arrives_as_sent_and_one_key_goes_to_one_partition(topics: Settings) -> None:
    async with JobProducer.from_settings(topics) as producer:
        receipts = await producer.send_all([REQUEST] * 5, Lane.INTERACTIVE)
    found = await records(topics, Lane.INTERACTIVE, 5)
    assert len({receipt.job_id for receipt in receipts}) == 5
    assert {receipt.job_id.version for receipt in receipts} == {7}
    assert {(record.partition, record.key) for record in found} == {(receipts[0].partition, b"acme/support")}
    sent = [JobRequest.model_validate_json(record.value) for record in found]
    assert [request.job_id for request in sent] == [receipt.job_id for receipt in receipts]
    assert all(request.model_copy(update={"job_id": None}) == REQUEST for request in sent)
    assert json.loads(found[0].value).keys() == {"job_id", "tenant", "adapter", "prompt", "sampling"}


async def test_with_a_producer_key_records_are_signed(topics: Settings) -> None:
    signing = topics.model_copy(update={"producer_key": SecretStr("lqpk_secret")})
    async with JobProducer.from_settings(signing) as producer:
        await producer.send(REQUEST)
    [record] = await records(topics, Lane.STANDARD, 1)
    assert dict(record.headers)[SIGNATURE_HEADER] == signature(b"lqpk_secret", record.value).encode()


async def test_a_record_that_is_too_large_is_an_input_error(topics: Settings) -> None:
    async with JobProducer.from_settings(topics) as producer:
        with pytest.raises(InputError, match="larger than Kafka at"):
            await producer.send(REQUEST.model_copy(update={"prompt": "x" * 1_100_000}))


async def test_without_a_broker_the_error_names_its_address(settings: Settings) -> None:
    away = settings.model_copy(update={"kafka_bootstrap": "127.0.0.1:1"})
    with pytest.raises(RetryableError, match=r"127\.0\.0\.1:1.*LORAQ_KAFKA_BOOTSTRAP"):
        async with JobProducer.from_settings(away):
            pass
