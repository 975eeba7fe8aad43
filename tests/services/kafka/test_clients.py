"""The topics of a pool, client options from the settings, and errors that name the culprit."""

import asyncio
import logging
import ssl
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import (
    KafkaConnectionError,
    MessageSizeTooLargeError,
    NoOffsetForPartitionError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)
from pydantic import SecretStr

from schemas.common import Lane
from services.errors import ConfigError, InputError, RetryableError, ServiceError
from services.kafka import clients as kafka
from services.process.settings import Settings

pytestmark = pytest.mark.slow

SASL = {
    "kafka_security_protocol": "SASL_SSL",
    "kafka_sasl_mechanism": "SCRAM-SHA-512",
    "kafka_sasl_username": "loraq",
    "kafka_sasl_password": SecretStr("secret"),
}


async def test_the_topics_of_a_pool_are_created_once(broker_settings: Settings) -> None:
    created = await kafka.ensure_topics(broker_settings)
    assert {name.removeprefix(f"{broker_settings.topic_prefix}.default.") for name in created} == {
        "jobs.interactive",
        "jobs.standard",
        "jobs.batch",
        "jobs.dead",
        "events",
        "control",
    }
    assert await kafka.ensure_topics(broker_settings) == []
    async with kafka.admin(broker_settings) as admin:
        [jobs] = await admin.describe_topics([broker_settings.jobs_topic(Lane.BATCH)])
    assert len(jobs["partitions"]) == broker_settings.partitions


async def test_lanes_that_differ_in_partitions_are_refused(settings: Settings) -> None:
    async with kafka.admin(settings) as admin:
        await admin.create_topics([NewTopic(settings.jobs_topic(Lane.BATCH), settings.partitions + 1, 1)])
    with pytest.raises(ConfigError, match=r"equal partition counts: .*jobs\.batch has 4, .*jobs\.interactive has 3"):
        await kafka.ensure_topics(settings)


async def test_a_dead_letter_may_be_larger_than_a_job(broker_settings: Settings) -> None:
    """The dead-letter topic accepts the largest record of a job topic plus the headers that give the reason."""
    await kafka.ensure_topics(broker_settings)
    largest, headers = b"x" * (kafka.MAX_RECORD_BYTES - 200), [("reason", b"y" * 8192)]
    producer, dead = kafka.producer(broker_settings), kafka.dead_letter_producer(broker_settings)
    await producer.start()
    await dead.start()
    try:
        await producer.send_and_wait(broker_settings.jobs_topic(Lane.BATCH), largest)
        await dead.send_and_wait(broker_settings.dead_topic, largest, headers=headers)
    finally:
        await producer.stop()
        await dead.stop()


async def test_a_consumer_never_resets_its_position_and_moves_only_by_commit(broker_settings: Settings) -> None:
    """Without a committed offset polling raises; records that were consumed but not committed are consumed again."""
    await kafka.ensure_topics(broker_settings)
    topic = broker_settings.jobs_topic(Lane.STANDARD)
    producer = kafka.producer(broker_settings)
    await producer.start()
    for _ in range(3):
        await producer.send_and_wait(topic, b"value", partition=0)
    await producer.stop()
    with pytest.raises(NoOffsetForPartitionError):
        await consumed_offsets(broker_settings, topic)
    for commit in (0, None, 2):
        assert await consumed_offsets(broker_settings, topic, seek=0 if commit == 0 else None, commit=commit) == [
            0,
            1,
            2,
        ]
    assert await consumed_offsets(broker_settings, topic) == [2]


async def consumed_offsets(
    settings: Settings, topic: str, *, seek: int | None = None, commit: int | None = None
) -> list[int]:
    """Offsets of one partition up to the third record, from the group's position or from `seek`."""
    partition = TopicPartition(topic, 0)
    consumer = kafka.job_consumer(settings)
    consumer.subscribe([topic])
    await consumer.start()
    try:
        if seek is not None:
            consumer.seek(partition, seek)
        offsets: list[int] = []
        while not offsets or offsets[-1] < 2:
            for records in (await consumer.getmany(partition, timeout_ms=500)).values():
                offsets += [record.offset for record in records]
        if commit is not None:
            await consumer.commit({partition: commit})
        return offsets
    finally:
        await kafka.leave_group(consumer)


async def test_a_cluster_has_an_id(broker_settings: Settings) -> None:
    assert await kafka.cluster_id(broker_settings)


async def test_if_no_broker_answers_the_error_names_the_setting() -> None:
    nowhere = Settings(_env_file=None, kafka_bootstrap="127.0.0.1:1")
    with pytest.raises(RetryableError, match=r"Kafka at 127\.0\.0\.1:1 .* LORAQ_KAFKA_BOOTSTRAP"):
        await kafka.check_reachable(nowhere)


async def test_broker_errors_of_the_library_are_reported_once_and_its_later_log_lines_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nowhere, log = Settings(_env_file=None, kafka_bootstrap="127.0.0.1:1"), logging.getLogger("aiokafka")
    later, tasks = asyncio.Event(), []

    async def background() -> None:
        await later.wait()
        log.error('Unable to request metadata from "%s": %s', "broker", KafkaConnectionError("gone"))

    async def start() -> None:
        with kafka.starting(nowhere):
            tasks.append(asyncio.create_task(background()))
            log.error('Unable connect to "%s": %s', "broker", KafkaConnectionError("cannot be reached"))
            raise KafkaConnectionError("Unable to bootstrap")

    with pytest.raises(RetryableError, match="cannot be reached"):
        await start()
    assert caplog.messages == []
    later.set()
    await tasks[0]
    assert caplog.messages == ['Unable to request metadata from "broker": KafkaConnectionError: gone']


def test_credentials_and_tls_come_from_the_settings() -> None:
    options = kafka.client_options(Settings(_env_file=None, **SASL))  # type: ignore[arg-type]  # pydantic checks them
    assert options["security_protocol"] == "SASL_SSL"
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("loraq", "secret")
    assert options["ssl_context"].check_hostname


def test_missing_credentials_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SASL_SSL needs LORAQ_KAFKA_SASL_USERNAME"):
        kafka.client_options(Settings(_env_file=None, **SASL | {"kafka_sasl_password": None}))  # type: ignore[arg-type]
    absent = tmp_path / "absent.pem"
    with pytest.raises(ConfigError, match=r"LORAQ_KAFKA_SSL_CAFILE=.*absent\.pem"):
        kafka.client_options(Settings(_env_file=None, kafka_security_protocol="SSL", kafka_ssl_cafile=absent))


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (SaslAuthenticationFailed("no"), ConfigError, "refused the credentials"),
        (UnsupportedSaslMechanismError("no"), ConfigError, "does not support LORAQ_KAFKA_SASL_MECHANISM=PLAIN"),
        (ssl.SSLCertVerificationError("no"), ConfigError, "cannot be trusted; check LORAQ_KAFKA_SSL_CAFILE"),
        (ssl.SSLError("no"), ConfigError, "the TLS handshake with"),
        (TopicAuthorizationFailedError("no"), ConfigError, "check its ACLs"),
        (MessageSizeTooLargeError("big"), InputError, "larger than"),
        (KafkaConnectionError("gone"), RetryableError, "the request to Kafka at 127.0.0.1:9092 failed"),
        (OSError("gone"), RetryableError, "the request to Kafka at 127.0.0.1:9092 failed"),
    ],
)
def test_each_error_has_its_translation(error: Exception, kind: type[ServiceError], sentence: str) -> None:
    translated = kafka.translated(error, Settings(_env_file=None))
    assert type(translated) is kind
    assert sentence in str(translated)
