"""Which dead letters were sent back before, as Postgres remembers it.

Two things keep a replay from doing harm twice. The mark here, which people see and `replay` heeds; and the header that
says where the record first stood, from which a job without an id gets the same id each time, so that even two operators
at once, or a command that died between sending and marking, make one job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.dlq.dead_letters import Letter, LetterPlace
from services.postgres.pool import Connection

KEEP = "90 days"

LOOK_UP = """
select partition, "offset", times, sent_at, sent_to
from unnest($3::integer[], $4::bigint[], $5::timestamptz[]) as asked (partition, "offset", put_aside_at)
join loraq.dead_letter_replays using (partition, "offset", put_aside_at)
where cluster = $1 and topic = $2
"""
BEGIN = """
insert into loraq.dead_letter_replays (cluster, topic, partition, "offset", put_aside_at)
select $1, $2, partition, "offset", put_aside_at
from unnest($3::integer[], $4::bigint[], $5::timestamptz[]) as asked (partition, "offset", put_aside_at)
order by partition, "offset"
on conflict (cluster, topic, partition, "offset", put_aside_at) do update
set times = dead_letter_replays.times + 1, begun_at = now(), sent_at = null, sent_to = null
"""
SENT = """
update loraq.dead_letter_replays as replays
set sent_at = now(), sent_to = asked.sent_to
from unnest($3::integer[], $4::bigint[], $5::timestamptz[], $6::text[])
    as asked (partition, "offset", put_aside_at, sent_to)
where replays.cluster = $1 and replays.topic = $2 and replays.partition = asked.partition
    and replays."offset" = asked."offset" and replays.put_aside_at = asked.put_aside_at
"""
FORGET = "delete from loraq.dead_letter_replays where begun_at < now() - $1::text::interval"


@dataclass(frozen=True, slots=True)
class Mark:
    """A replay: how often, and where the newest stands. `sent_at` is None where a command ended before it knew."""

    times: int
    sent_at: datetime | None
    sent_to: str | None

    @property
    def how_often(self) -> str:
        """In words."""
        return "once" if self.times == 1 else f"{self.times} times"


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one dead-letter topic of one cluster."""

    cluster: str
    topic: str

    async def of(self, connection: Connection, letters: Sequence[Letter]) -> dict[LetterPlace, Mark]:
        """Those of the letters that were sent back before."""
        rows = await connection.fetch(LOOK_UP, *self._columns(letters))
        return {
            LetterPlace(row["partition"], row["offset"]): Mark(row["times"], row["sent_at"], row["sent_to"])
            for row in rows
        }

    async def begin(self, connection: Connection, letters: Sequence[Letter]) -> None:
        """Note that the letters are about to be sent; forgets what is long past."""
        await connection.execute(FORGET, KEEP)
        await connection.execute(BEGIN, *self._columns(letters))

    async def sent(self, connection: Connection, letters: Sequence[Letter], places: Sequence[str]) -> None:
        """Note where the broker put them."""
        await connection.execute(SENT, *self._columns(letters), list(places))

    def _columns(self, letters: Sequence[Letter]) -> list[object]:
        return [
            self.cluster,
            self.topic,
            [letter.place.partition for letter in letters],
            [letter.place.offset for letter in letters],
            [letter.put_aside_at for letter in letters],
        ]
