"""Kafka clients with safe options, and the topics of a pool.

The library's defaults can lose data (automatic commits, starting at the newest record, acknowledgement by one replica).
Every client is created here, so that none of those defaults is in use.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code
from aiokafka.helpers import create_ssl_context

from schemas.common import Lane
from services.errors import ConfigError, RetryableError
from services.kafka.assignor import StickyLaneAssignor
from services.kafka.errors import errors_translated as errors_translated
from services.kafka.errors import starting as starting
from services.kafka.errors import translated as translated
from services.process.settings import Settings

MAX_RECORD_BYTES = 1024 * 1024
MAX_DEAD_RECORD_BYTES = 2 * 1024 * 1024
REQUEST_TIMEOUT_MS = 20_000
METADATA_MAX_AGE_MS = 30_000
REBALANCE_TIMEOUT_S = 60.0
# How long a broker may delay a fetch that finds no records. Partitions resumed meanwhile are fetched only after it.
# Apache Kafka answers as soon as a record arrives; the embedded broker checks at intervals of up to half this time.
FETCH_WAIT_MS = 50
TOPICS_VISIBLE_TIMEOUT_S = 30.0


def client_options(settings: Settings) -> dict[str, Any]:
    """Options that every Kafka client shares: addresses and credentials."""
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
        raise ConfigError(f"cannot load the TLS files for Kafka ({given}): {error}") from error


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
    """A consumer in the pool's group, not yet subscribed or started. Values are bytes; offsets move only by commit.

    Polling raises if the group has no committed offset, or one that no longer exists, so that no reset goes unnoticed
    (`positions.py`).

    The assignor gives partition i of every lane to one member, so an adapter's jobs meet the same caches, and moves as
    few partitions as possible when a member joins or leaves (`assignment.py`).
    """
    session_ms = round(settings.kafka_session_timeout_s * 1000)
    return AIOKafkaConsumer(
        **client_options(settings),
        client_id=client_id,
        group_id=settings.consumer_group,
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level="read_committed",
        partition_assignment_strategy=(StickyLaneAssignor(),),
        session_timeout_ms=session_ms,
        heartbeat_interval_ms=max(1, session_ms // 4),
        rebalance_timeout_ms=round(max(REBALANCE_TIMEOUT_S, settings.kafka_session_timeout_s) * 1000),
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_poll_records=max_poll_records,
    )


def control_consumer(settings: Settings) -> Any:
    """A consumer of the whole control topic from its earliest record, without a group, not yet started."""
    return AIOKafkaConsumer(
        settings.control_topic,
        **client_options(settings),
        client_id="loraq-control",
        group_id=None,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )


def refresh_metadata(consumer: Any) -> None:
    """Request an early update of a consumer's topics and partitions."""
    consumer._client.force_metadata_update()  # noqa: SLF001  # the library has no public method for it


async def committed_offsets(consumer: Any, partitions: list[Any]) -> dict[Any, tuple[int, str]]:
    """Committed offset and metadata of those partitions that have one; waits as long as the broker is unreachable."""
    coordinator = consumer._coordinator  # noqa: SLF001  # the library's own `committed` leaves the metadata out
    return dict(await coordinator.fetch_committed_offsets(partitions))


def position_and_end(consumer: Any, partition: Any) -> tuple[int | None, int | None]:
    """Position of the next fetch, and the last stable offset; None while unknown.

    The position moves past transaction markers without a record, and the library returns no record past the last
    stable offset.
    """
    subscription = consumer._subscription.subscription  # noqa: SLF001  # the library's own `position` waits for one
    assignment = subscription.assignment if subscription else None
    if assignment is None or partition not in assignment.tps:
        return None, None
    state = assignment.state_value(partition)
    return (state.position if state.has_valid_position else None), state.lso


async def leave_group(consumer: Any) -> None:
    """Stop a consumer and make it leave its group."""
    coordinator = consumer._coordinator  # noqa: SLF001  # the library has no public method for it
    if getattr(coordinator, "generation", None) == 0:
        # The embedded broker counts generations from 0, which to the library means "never joined": it would not send
        # LeaveGroup, and the next member would wait until this one's session times out.
        coordinator.generation = 1
    await consumer.stop()


def producer(
    settings: Settings,
    *,
    client_id: str = "loraq",
    max_request_size: int = MAX_RECORD_BYTES,
    compression: str | None = None,
) -> Any:
    """A producer, not yet started. A record counts as sent when every in-sync replica has it.

    It is not idempotent: a retry may duplicate a record, which our consumers recognise by its id.
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
    """A producer for the dead-letter topic; it accepts the largest job record plus the headers that give the reason."""
    return producer(settings, client_id="loraq-dead-letters", max_request_size=MAX_DEAD_RECORD_BYTES)


@asynccontextmanager
async def admin(settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client. Raises RetryableError if no broker answers."""
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
    """Return when a broker answers; raises RetryableError or ConfigError with the reason otherwise."""
    async with admin(settings) as client:
        await client.list_topics()


async def cluster_id(settings: Settings) -> str:
    """Id of the cluster; empty if the brokers report none."""
    async with admin(settings) as client:
        described = await client.describe_cluster()
    return str(described.get("cluster_id") or "")


def pool_topics(settings: Settings) -> list[NewTopic]:
    """The topics of a pool, as `ensure_topics` creates them."""
    copies = settings.replication_factor
    jobs = [NewTopic(settings.jobs_topic(lane), settings.partitions, copies) for lane in Lane]
    dead_config = {"max.message.bytes": str(MAX_DEAD_RECORD_BYTES)}
    dead = NewTopic(settings.dead_topic, settings.partitions, copies, topic_configs=dead_config)
    events = NewTopic(settings.events_topic, settings.partitions, copies)
    control = NewTopic(settings.control_topic, 1, copies)
    return [*jobs, dead, events, control]


async def ensure_topics(settings: Settings) -> list[str]:
    """Create the pool's missing topics and return their names; safe to run at any time and concurrently.

    Raises ConfigError if existing lanes differ in their number of partitions.
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
            raise translated(error(f"topic {name} was not created"), settings)


async def _wait_until_visible(client: AIOKafkaAdminClient, names: set[str]) -> None:
    deadline = time.monotonic() + TOPICS_VISIBLE_TIMEOUT_S
    while not names <= set(await client.list_topics()):
        if time.monotonic() > deadline:
            raise RetryableError(f"the brokers created the topics {', '.join(sorted(names))} but do not list them yet")
        await asyncio.sleep(0.1)


async def _check_lanes_agree(client: AIOKafkaAdminClient, settings: Settings) -> None:
    described = await client.describe_topics([settings.jobs_topic(lane) for lane in Lane])
    counts = {topic["topic"]: len(topic["partitions"]) for topic in described}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in sorted(counts.items()))
        raise ConfigError(f"the lanes of a pool need equal partition counts: {listed}; recreate the topics that differ")
