"""Reads a topic up to its current end, without a group, so no committed offset changes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from datetime import datetime
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import for_code

from services.errors import InputError, MissingTopicError, RetryableError
from services.kafka import clients as kafka
from services.kafka import header_names
from services.process.settings import Settings

POLL_MS = 200
SILENCE_S = 30.0


async def partitions_of(settings: Settings, topic: str) -> list[int]:
    """Numbers of a topic's partitions; raises InputError if the topic does not exist.

    It lists the topics first, because the embedded broker creates a topic when asked to describe it.
    """
    async with kafka.admin(settings) as admin:
        if topic not in await admin.list_topics():
            hint = "create it with `loraq topics`, or allow this user to describe it"
            raise InputError(f"there is no topic {topic} on {settings.kafka_bootstrap}; {hint}")
        [described] = await admin.describe_topics([topic])
    if code := described["error_code"]:
        raise kafka.translated(for_code(code)(topic), settings)
    return sorted(partition["partition"] for partition in described["partitions"])


async def require_topics(settings: Settings, topics: Collection[str]) -> None:
    """Raise MissingTopicError naming the topics that do not exist.

    Without this check a consumer would wait for them, or the broker would create them.
    """
    async with kafka.admin(settings) as admin:
        if missing := sorted(set(topics) - set(await admin.list_topics())):
            raise MissingTopicError(
                f"there is no topic {' and no '.join(missing)} on {settings.kafka_bootstrap}; create them with `loraq"
                f" topics`, allow this user to describe them, or correct LORAQ_POOL={settings.pool} or"
                f" LORAQ_TOPIC_PREFIX={settings.topic_prefix}"
            )


async def scan(
    settings: Settings,
    topic: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    partitions: Collection[int] | None = None,
) -> AsyncGenerator[Any, None]:
    """The library's messages of a topic, in order within each partition, up to its end at the time of the call.

    `since` skips records that are older by the broker's timestamps; `until` ends a partition at its first newer record.
    Raises InputError if the topic does not exist, RetryableError or ConfigError if it cannot be read.
    """
    chosen = [number for number in await partitions_of(settings, topic) if partitions is None or number in partitions]
    if not chosen:
        return
    header_names.tolerate()
    consumer = AIOKafkaConsumer(
        **kafka.client_options(settings),
        client_id="loraq-scan",
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=POLL_MS // 2,
    )
    try:
        with kafka.starting(settings):
            await consumer.start()
            await _seek(consumer, [TopicPartition(topic, number) for number in chosen], since)
        async for message in _until_end(consumer, settings, until):
            yield message
    finally:
        await consumer.stop()


async def _seek(consumer: Any, places: list[TopicPartition], since: datetime | None) -> None:
    consumer.assign(places)
    if since is None or not places:
        return
    found = await consumer.offsets_for_times(dict.fromkeys(places, max(0, round(since.timestamp() * 1000))))
    for place, at in found.items():
        if at is None:  # no record is that new
            await consumer.seek_to_end(place)
        else:
            consumer.seek(place, at.offset)


async def _until_end(consumer: Any, settings: Settings, until: datetime | None) -> AsyncGenerator[Any, None]:
    """Takes the ends from the first fetch responses: the embedded broker's offset lookup reports outdated ones."""
    ends: dict[TopicPartition, int] = {}
    last_ms = until.timestamp() * 1000 if until else float("inf")
    open_places, silent_since = set(consumer.assignment()), time.monotonic()
    while open_places:
        with kafka.errors_translated(settings):
            batches = await consumer.getmany(*open_places, timeout_ms=POLL_MS)
        for place in open_places - ends.keys():
            if (end := consumer.highwater(place)) is not None:
                ends[place] = end
        for place, messages in batches.items():
            for message in messages:
                if message.timestamp > last_ms:
                    ends[place] = message.offset
                elif message.offset < ends[place]:
                    yield message
        for place in [place for place in open_places if place in ends]:
            if await consumer.position(place) >= ends[place]:
                open_places.discard(place)
                silent_since = time.monotonic()
        if batches:
            silent_since = time.monotonic()
        elif time.monotonic() - silent_since > SILENCE_S:
            raise RetryableError(f"Kafka at {settings.kafka_bootstrap} sent nothing for {SILENCE_S:g} s; try again")
        await asyncio.sleep(0)
