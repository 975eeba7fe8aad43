"""Kafka plumbing: clients with safe options, and the topics of a pool.

The library's defaults lose data in several ways (automatic commits, starting at the newest record, one replica's
acknowledgement); every client of ours is made here so that none of them is in use.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code
from aiokafka.helpers import create_ssl_context

from schemas.common import Lane
from services.errors import ConfigError, RetryableError
from services.kafka.errors import errors_translated as errors_translated
from services.kafka.errors import starting as starting
from services.kafka.errors import translated as translated
from services.process.settings import Settings

MAX_RECORD_BYTES = 1024 * 1024
MAX_DEAD_RECORD_BYTES = 2 * 1024 * 1024
REQUEST_TIMEOUT_MS = 20_000
METADATA_MAX_AGE_MS = 30_000
REBALANCE_TIMEOUT_S = 60.0
# How long a broker may keep a fetch that finds nothing; partitions that go on meanwhile are fetched only after it.
# Apache Kafka answers as soon as a record comes; the embedded broker looks only now and then, up to half of this apart.
FETCH_WAIT_MS = 50
TOPICS_VISIBLE_TIMEOUT_S = 30.0


def client_options(settings: Settings) -> dict[str, Any]:
    """Options that every Kafka client shares: where the brokers are and how to prove who we are."""
    protocol = settings.kafka_security_protocol
    options: dict[str, Any] = {
        "bootstrap_servers": settings.kafka_bootstrap,
        "security_protocol": protocol,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "metadata_max_age_ms": METADATA_MAX_AGE_MS,
    }
    if protocol in ("SSL", "SASL_SSL"):
        options["ssl_context"] = _ssl_context(settings)
    if protocol.startswith("SASL"):
        options |= _sasl_options(settings)
    return options


def _ssl_context(settings: Settings) -> Any:
    files = {
        "cafile": settings.kafka_ssl_cafile,
        "certfile": settings.kafka_ssl_certfile,
        "keyfile": settings.kafka_ssl_keyfile,
    }
    try:
        return create_ssl_context(**{name: str(path) for name, path in files.items() if path is not None})
    except OSError as error:
        given = ", ".join(f"LORAQ_KAFKA_SSL_{name.upper()}={path}" for name, path in files.items() if path)
        raise ConfigError(f"the TLS files of Kafka cannot be used ({given}): {error}") from error


def _sasl_options(settings: Settings) -> dict[str, Any]:
    if settings.kafka_sasl_username is None or settings.kafka_sasl_password is None:
        raise ConfigError(
            f"LORAQ_KAFKA_SECURITY_PROTOCOL={settings.kafka_security_protocol} needs"
            " LORAQ_KAFKA_SASL_USERNAME and LORAQ_KAFKA_SASL_PASSWORD"
        )
    return {
        "sasl_mechanism": settings.kafka_sasl_mechanism,
        "sasl_plain_username": settings.kafka_sasl_username,
        "sasl_plain_password": settings.kafka_sasl_password.get_secret_value(),
    }


def job_consumer(settings: Settings, *, client_id: str = "loraq-worker", max_poll_records: int = 500) -> Any:
    """A consumer in the pool's group, not yet subscribed or started; values are bytes, offsets move only by commit.

    Where there is no position, or none that exists, polling raises: no reset goes unnoticed (`positions.py`).

    Ranges keep partition i of every lane with one member, so an adapter's jobs meet the same caches.
    """
    session_ms = round(settings.kafka_session_timeout_s * 1000)
    return AIOKafkaConsumer(
        **client_options(settings),
        client_id=client_id,
        group_id=settings.consumer_group,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
        partition_assignment_strategy=(RangePartitionAssignor,),
        session_timeout_ms=session_ms,
        heartbeat_interval_ms=max(1, session_ms // 4),
        rebalance_timeout_ms=round(max(REBALANCE_TIMEOUT_S, settings.kafka_session_timeout_s) * 1000),
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_poll_records=max_poll_records,
    )


def control_consumer(settings: Settings) -> Any:
    """A consumer of the whole control topic from its earliest record on, outside any group, not yet started."""
    return AIOKafkaConsumer(
        settings.control_topic,
        **client_options(settings),
        client_id="loraq-control",
        group_id=None,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )


def look_again(consumer: Any) -> None:
    """Have a consumer look soon which topics and partitions there are."""
    consumer._client.force_metadata_update()  # noqa: SLF001  # the library has no other way to say it


async def commits_of(consumer: Any, partitions: list[Any]) -> dict[Any, tuple[int, str]]:
    """Committed position and metadata of those partitions that have one; waits for as long as the broker is away."""
    coordinator = consumer._coordinator  # noqa: SLF001  # the library's own `committed` leaves the metadata out
    return dict(await coordinator.fetch_committed_offsets(partitions))


def reading_of(consumer: Any, partition: Any) -> tuple[int | None, int | None]:
    """Position of the next fetch, and the end of what may be read; None while unknown.

    Transactions' markers are passed over by the position without a record, and nothing past the last stable offset
    is handed out.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001  # the library's own `position` waits for one
    assignment = subscription.assignment if subscription else None
    if assignment is None or partition not in assignment.tps:
        return None, None
    state = assignment.state_value(partition)
    return (state.position if state.has_valid_position else None), state.lso


async def leave(consumer: Any) -> None:
    """Stop a consumer and tell its group."""
    coordinator = consumer._coordinator  # noqa: SLF001  # the library has no other way to say it
    if getattr(coordinator, "generation", None) == 0:
        # The embedded broker counts generations from 0, which the library takes for "never joined": it would not tell
        # the group, and the next member would wait for this one's session to run out.
        coordinator.generation = 1
    await consumer.stop()


def producer(
    settings: Settings,
    *,
    client_id: str = "loraq",
    max_request_size: int = MAX_RECORD_BYTES,
    compression: str | None = None,
) -> Any:
    """A producer, not yet started, that counts a record as sent when every in-sync replica has it.

    Not idempotent: a retry may repeat a record, which every consumer of ours recognises by its id.
    """
    return AIOKafkaProducer(
        **client_options(settings),
        client_id=client_id,
        acks="all",
        max_request_size=max_request_size,
        compression_type=compression,
        linger_ms=2,
    )


def dead_letter_producer(settings: Settings) -> Any:
    """A producer for the dead-letter topic: room for the largest job record and the headers that say why."""
    return producer(settings, client_id="loraq-dead-letters", max_request_size=MAX_DEAD_RECORD_BYTES)


@asynccontextmanager
async def admin(settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client; raises RetryableError when no broker answers."""
    client = AIOKafkaAdminClient(**client_options(settings), client_id="loraq-admin")
    try:
        with starting(settings):
            await client.start()
        yield client
    except (KafkaError, OSError) as error:
        raise translated(error, settings) from error
    finally:
        await client.close()


async def check_reachable(settings: Settings) -> None:
    """Return when a broker answers; raises RetryableError or ConfigError saying why not."""
    async with admin(settings) as client:
        await client.list_topics()


async def cluster_id(settings: Settings) -> str:
    """Id of the cluster, empty for brokers that have none."""
    async with admin(settings) as client:
        described = await client.describe_cluster()
    return str(described.get("cluster_id") or "")


def pool_topics(settings: Settings) -> list[NewTopic]:
    """The topics of a pool as they should be made."""
    copies = settings.replication_factor
    jobs = [NewTopic(settings.jobs_topic(lane), settings.partitions, copies) for lane in Lane]
    dead_config = {"max.message.bytes": str(MAX_DEAD_RECORD_BYTES)}
    dead = NewTopic(settings.dead_topic, settings.partitions, copies, topic_configs=dead_config)
    events = NewTopic(settings.events_topic, settings.partitions, copies)
    control = NewTopic(settings.control_topic, 1, copies)
    return [*jobs, dead, events, control]


async def ensure_topics(settings: Settings) -> list[str]:
    """Make the pool's missing topics and return their names; safe to run at any time and twice at once.

    Raises ConfigError when lanes that exist already differ in partitions: their numbers must meet.
    """
    async with admin(settings) as client:
        existing = set(await client.list_topics())
        missing = [topic for topic in pool_topics(settings) if topic.name not in existing]
        if missing:
            response = await client.create_topics(missing, timeout_ms=REQUEST_TIMEOUT_MS)
            _check_created(response, settings)
        await _wait_until_visible(client, {topic.name for topic in missing})
        await _check_lanes_agree(client, settings)
    return [topic.name for topic in missing]


def _check_created(response: Any, settings: Settings) -> None:
    for name, code, *_ in response.topic_errors:
        error = for_code(code)
        if code and error is not TopicAlreadyExistsError:
            raise translated(error(f"topic {name} was not made"), settings)


async def _wait_until_visible(client: AIOKafkaAdminClient, names: set[str]) -> None:
    deadline = time.monotonic() + TOPICS_VISIBLE_TIMEOUT_S
    while not names <= set(await client.list_topics()):
        if time.monotonic() > deadline:
            raise RetryableError(f"the brokers made the topics {', '.join(sorted(names))} but do not list them yet")
        await asyncio.sleep(0.1)


async def _check_lanes_agree(client: AIOKafkaAdminClient, settings: Settings) -> None:
    described = await client.describe_topics([settings.jobs_topic(lane) for lane in Lane])
    counts = {topic["topic"]: len(topic["partitions"]) for topic in described}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in sorted(counts.items()))
        raise ConfigError(f"the lanes of a pool need equal partition counts: {listed}")
