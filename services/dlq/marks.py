"""Marks in Postgres of the dead letters that were replayed.

Two things make replays idempotent. `replay` skips marked dead letters. And a header names the record's original
position, from which a job without an id gets the same id each time: two operators at once, or a command that was killed
between sending and marking, create one job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.dlq.dead_letters import DeadLetter, DeadLetterPosition
from services.postgres.pool import Connection

RETENTION = "90 days"

LOOK_UP = """
select partition, "offset", times, sent_at, sent_to
from unnest($3::integer[], $4::bigint[], $5::timestamptz[]) as marked (partition, "offset", put_aside_at)
join loraq.dead_letter_replays using (partition, "offset", put_aside_at)
where cluster = $1 and topic = $2
"""
MARK_STARTED = """
insert into loraq.dead_letter_replays (cluster, topic, partition, "offset", put_aside_at)
select $1, $2, partition, "offset", put_aside_at
from unnest($3::integer[], $4::bigint[], $5::timestamptz[]) as marked (partition, "offset", put_aside_at)
order by partition, "offset"
on conflict (cluster, topic, partition, "offset", put_aside_at) do update
set times = dead_letter_replays.times + 1, begun_at = now(), sent_at = null, sent_to = null
"""
MARK_SENT = """
update loraq.dead_letter_replays as replays
set sent_at = now(), sent_to = marked.sent_to
from unnest($3::integer[], $4::bigint[], $5::timestamptz[], $6::text[])
    as marked (partition, "offset", put_aside_at, sent_to)
where replays.cluster = $1 and replays.topic = $2 and replays.partition = marked.partition
    and replays."offset" = marked."offset" and replays.put_aside_at = marked.put_aside_at
"""
DELETE_OLD = "delete from loraq.dead_letter_replays where begun_at < now() - $1::text::interval"


@dataclass(frozen=True, slots=True)
class Mark:
    """How often a dead letter was replayed, and where the last record is. `sent_at` is None if that is unknown."""

    times: int
    sent_at: datetime | None
    sent_to: str | None

    @property
    def how_often(self) -> str:
        """`once` or `N times`."""
        return "once" if self.times == 1 else f"{self.times} times"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one dead-letter topic of one cluster."""

    cluster: str
    topic: str

    async def of(self, connection: Connection, letters: Sequence[DeadLetter]) -> dict[DeadLetterPosition, Mark]:
        """The marks of those dead letters that were replayed."""
        rows = await connection.fetch(LOOK_UP, *self._columns(letters))
        return {
            DeadLetterPosition(row["partition"], row["offset"]): Mark(row["times"], row["sent_at"], row["sent_to"])
            for row in rows
        }

    async def begin(self, connection: Connection, letters: Sequence[DeadLetter]) -> None:
        """Mark the dead letters before they are sent, and delete old marks."""
        await connection.execute(DELETE_OLD, RETENTION)
        await connection.execute(MARK_STARTED, *self._columns(letters))

    async def sent(self, connection: Connection, letters: Sequence[DeadLetter], sent_to: Sequence[str]) -> None:
        """Record where the broker stored the sent records."""
        await connection.execute(MARK_SENT, *self._columns(letters), list(sent_to))

    def _columns(self, letters: Sequence[DeadLetter]) -> list[object]:
        return [
            self.cluster,
            self.topic,
            [letter.position.partition for letter in letters],
            [letter.position.offset for letter in letters],
            [letter.dead_lettered_at for letter in letters],
        ]
