"""`loraq dlq list` and `show`: reads the newest matching dead letters and counts all by error code."""

import base64
import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from services.dlq.dead_letters import DeadLetter, DeadLetterPosition, dead_letter_of
from services.dlq.filters import DeadLetterFilter
from services.dlq.marks import Mark, Marks
from services.errors import RetryableError
from services.kafka import clients as kafka
from services.kafka.reading import scan
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings

MAX_SHOWN_MESSAGE = 120
COLUMNS = ("letter", "put_aside_at", "error_code", "tenant", "adapter", "source", "error_message", "replayed")


async def newest(settings: Settings, matching: DeadLetterFilter, limit: int) -> tuple[list[DeadLetter], Counter[str]]:
    """The newest `limit` matching dead letters, newest first, and the number of all matching ones by error code."""
    found: list[tuple[Any, DeadLetter]] = []
    counts: Counter[str] = Counter()
    async with aclosing(
        scan(settings, settings.dead_topic, since=matching.since, partitions=matching.partitions)
    ) as read:
        async for message in read:
            letter = dead_letter_of(message)
            if matching.matches(letter):
                counts[letter.code or "not loraq's"] += 1
                add = heapq.heappush if len(found) < limit else heapq.heappushpop
                add(found, ((letter.dead_lettered_at, letter.position), letter))
    return [letter for _, letter in sorted(found, reverse=True)], counts


async def marks_if_available(settings: Settings, letters: Sequence[DeadLetter]) -> dict[DeadLetterPosition, Mark]:
    """The replay marks of the dead letters; if the database is unavailable, a warning and no marks."""
    if not letters:
        return {}
    marks = Marks(await kafka.cluster_id(settings), settings.dead_topic)
    try:
        async with open_pool(settings) as pool, transaction(pool, "look up replays") as connection:
            return await marks.of(connection, letters)
    except RetryableError as error:
        click.echo(f"Cannot tell which dead letters were replayed: {error}", err=True)
        return {}


def table_row(letter: DeadLetter, mark: Mark | None) -> dict[str, Any]:
    """A row of the table."""
    message = letter.message if len(letter.message) <= MAX_SHOWN_MESSAGE else letter.message[:MAX_SHOWN_MESSAGE] + "…"
    return {
        "letter": letter.position,
        "put_aside_at": letter.dead_lettered_at.isoformat(timespec="seconds"),
        "error_code": letter.code,
        "tenant": letter.tenant,
        "adapter": letter.adapter,
        "source": source_text(letter),
        "error_message": message,
        "replayed": mark and replayed_text(mark),
    }


def source_text(letter: DeadLetter) -> str | None:
    """`topic partition:offset`."""
    return f"{letter.source.topic} {letter.source.partition}:{letter.source.offset}" if letter.source else None


def replayed_text(mark: Mark) -> str:
    """How often it was replayed, and where to."""
    return f"{mark.how_often}, {f'to {mark.sent_to}' if mark.sent_to else 'the last one possibly not sent'}"


def fields(letter: DeadLetter, mark: Mark | None) -> dict[str, Any]:
    """All fields of a dead letter for JSON. Bytes that are not UTF-8 become `…_base64`."""
    source = letter.source
    return {
        "letter": str(letter.position),
        "put_aside_at": letter.dead_lettered_at,
        "error_code": letter.code,
        "error_message": letter.message,
        "source": source
        and {"topic": source.topic, "partition": source.partition, "offset": source.offset}
        | ({"timestamp_ms": source.timestamp_ms} if source.timestamp_ms else {}),
        "tenant": letter.tenant,
        "adapter": letter.adapter,
        "job_id": letter.job_id,
        **_content("key", letter.key),
        **_content("value", letter.value),
        "omitted_bytes": letter.omitted_bytes,
        "headers": [{"name": name, **_content("value", content)} for name, content in letter.headers],
        "replays": mark.times if mark else 0,
        "replayed_at": mark.sent_at if mark else None,
        "replayed_to": mark.sent_to if mark else None,
    }


def _content(name: str, content: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        assert content is not None
        return {f"{name}_base64": base64.b64encode(content).decode()}
