"""What `loraq dlq list` and `show` tell: the newest letters that were chosen, and how many there are of each kind."""

import base64
import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from services.dlq.dead_letters import Letter, LetterPlace, letter_of
from services.dlq.filters import Choice
from services.dlq.marks import Mark, Marks
from services.errors import RetryableError
from services.kafka import clients as kafka
from services.kafka.reading import scan
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings

MAX_SHOWN_MESSAGE = 120
COLUMNS = {
    "letter": "letter",
    "put_aside_at": "put aside",
    "error_code": "error",
    "tenant": "tenant",
    "adapter": "adapter",
    "source": "came from",
    "error_message": "why",
    "replayed": "replayed",
}


async def newest(settings: Settings, choice: Choice, limit: int) -> tuple[list[Letter], Counter[str]]:
    """The newest `limit` of the chosen letters, newest first, and how many were chosen by error code."""
    found: list[tuple[Any, Letter]] = []
    counts: Counter[str] = Counter()
    async with aclosing(scan(settings, settings.dead_topic, since=choice.since, partitions=choice.partitions)) as read:
        async for message in read:
            letter = letter_of(message)
            if choice.takes(letter):
                counts[letter.code or "not loraq's"] += 1
                add = heapq.heappush if len(found) < limit else heapq.heappushpop
                add(found, ((letter.put_aside_at, letter.place), letter))
    return [letter for _, letter in sorted(found, reverse=True)], counts


async def marks_if_there(settings: Settings, letters: Sequence[Letter]) -> dict[LetterPlace, Mark]:
    """Marks of the letters. A database that is away hides them, which is said, and nothing else."""
    if not letters:
        return {}
    marks = Marks(await kafka.cluster_id(settings), settings.dead_topic)
    try:
        async with open_pool(settings) as pool, transaction(pool, "look up replays") as connection:
            return await marks.of(connection, letters)
    except RetryableError as error:
        click.echo(f"Which of them were replayed is not known: {error}", err=True)
        return {}


def table_row(letter: Letter, mark: Mark | None) -> dict[str, Any]:
    """A letter as one line for people."""
    message = letter.message if len(letter.message) <= MAX_SHOWN_MESSAGE else letter.message[:MAX_SHOWN_MESSAGE] + "…"
    return {
        "letter": letter.place,
        "put_aside_at": letter.put_aside_at.isoformat(timespec="seconds"),
        "error_code": letter.code,
        "tenant": letter.tenant,
        "adapter": letter.adapter,
        "source": source_text(letter),
        "error_message": message,
        "replayed": mark and said(mark),
    }


def source_text(letter: Letter) -> str | None:
    """`topic partition:offset`."""
    return f"{letter.source.topic} {letter.source.partition}:{letter.source.offset}" if letter.source else None


def said(mark: Mark) -> str:
    """How often and where to, in words."""
    return f"{mark.how_often}, {f'to {mark.sent_to}' if mark.sent_to else 'the newest perhaps in vain'}"


def fields(letter: Letter, mark: Mark | None) -> dict[str, Any]:
    """Everything about a letter, as JSON takes it. Bytes that are no UTF-8 come as `…_base64`."""
    source = letter.source
    return {
        "letter": str(letter.place),
        "put_aside_at": letter.put_aside_at,
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
