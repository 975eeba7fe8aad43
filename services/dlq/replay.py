"""What `loraq dlq replay` does: read, plan, mark, send, mark again, some letters at a time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from schemas.common import Lane
from services.dlq.dead_letters import Letter, letter_of
from services.dlq.edits import Edit
from services.dlq.filters import Choice
from services.dlq.marks import Mark, Marks
from services.dlq.plan import Order, Refuse, Send, plan
from services.errors import InputError
from services.kafka import clients as kafka
from services.kafka.reading import partitions_of, scan
from services.parsing.validation import said_by
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import producer_keys, require_tenant

BATCH = 100


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks for. With `again` letters that were sent back before are sent once more."""

    choice: Choice
    edit: Edit
    lane: Lane | None
    limit: int
    force: bool
    sign: bool
    again: bool
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one letter: replayed, would_replay, already_replayed or refused."""

    letter: Letter
    outcome: str
    to: str | None = None
    reason: str | None = None


async def replay(settings: Settings, wish: Wish) -> AsyncGenerator[list[Report], None]:
    """Send the chosen letters back, oldest first within each partition; yields reports batch by batch.

    Ends after `wish.limit` letters that were sent or refused. Raises InputError for a tenant that is not registered,
    whose letters would all come back, unless they are forced or get another one; RetryableError where Kafka or Postgres
    fails: what was sent until then is marked, so the same command goes on from there.
    """
    order = await _order(settings, wish)
    marks = Marks(await kafka.cluster_id(settings), settings.dead_topic)
    producer = kafka.producer(
        settings, client_id="loraq-replay", max_request_size=kafka.MAX_DEAD_RECORD_BYTES, compression="gzip"
    )
    async with open_pool(settings) as pool:
        run = _Run(settings, wish, order, pool, marks, producer)
        try:
            await _check_tenant(pool, wish)
            with kafka.starting(settings):
                await producer.start()
            async with aclosing(_batches(settings, wish)) as batches:
                left = wish.limit
                async for batch in batches:
                    reports = await run.batch(batch, left)
                    yield reports
                    left -= sum(report.outcome != "already_replayed" for report in reports)
                    if left <= 0:
                        return
        finally:
            await producer.stop()


async def _check_tenant(pool: Pool, wish: Wish) -> None:
    gets_another = wish.edit.value is not None or any(path == "tenant" for path, _ in wish.edit.sets)
    if wish.choice.tenant is None or wish.force or gets_another:
        return
    async with transaction(pool, "look up the tenant") as connection:
        await require_tenant(connection, wish.choice.tenant)


async def _order(settings: Settings, wish: Wish) -> Order:
    lanes = [wish.lane] if wish.lane else list(Lane)
    topics = {
        settings.jobs_topic(lane): len(await partitions_of(settings, settings.jobs_topic(lane))) for lane in lanes
    }
    return Order(
        topics=topics,
        to_topic=settings.jobs_topic(wish.lane) if wish.lane else None,
        edit=wish.edit,
        force=wish.force,
        sign=wish.sign,
        demands_signature=settings.require_signed_jobs,
    )


async def _batches(settings: Settings, wish: Wish) -> AsyncGenerator[list[Letter], None]:
    """The chosen letters, so many at a time. A whole new value is for one letter, so it must be the only one."""
    choice, batch, only_one = wish.choice, [], wish.edit.value is not None
    async with aclosing(scan(settings, settings.dead_topic, since=choice.since, partitions=choice.partitions)) as read:
        async for message in read:
            letter = letter_of(message)
            if not choice.takes(letter):
                continue
            batch.append(letter)
            if only_one and len(batch) > 1:
                raise InputError("--edit gives the value of one letter, but more are chosen; name it with --letter")
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


@dataclass(slots=True)
class _Run:
    settings: Settings
    wish: Wish
    order: Order
    pool: Pool
    marks: Marks
    producer: Any

    async def batch(self, letters: Sequence[Letter], limit: int) -> list[Report]:
        """Deal with some letters; past `limit` they are left alone."""
        async with transaction(self.pool, "look up replays") as connection:
            known = await self.marks.of(connection, letters)
            order = await self._with_keys(connection, letters)
        done = {place for place, mark in known.items() if mark.sent_at is not None and not self.wish.again}
        plans = [plan(letter, order) for letter in letters if letter.place not in done][:limit]
        return [
            *[_already(letter, known[letter.place]) for letter in letters if letter.place in done],
            *[Report(each.letter, "refused", reason=each.reason) for each in plans if isinstance(each, Refuse)],
            *await self._send([each for each in plans if isinstance(each, Send)]),
        ]

    async def _with_keys(self, connection: Any, letters: Sequence[Letter]) -> Order:
        """The order with the tenants' keys, where edited letters are to be signed."""
        if not self.wish.sign:
            return self.order
        tenants = {letter.tenant for letter in letters if letter.tenant}
        tenants |= {str(content) for path, content in self.wish.edit.sets if path == "tenant"}
        tenants |= {named for named in [said_by(None, self.wish.edit.value)[0]] if named}
        keys = await producer_keys(connection, SecretBox(self.settings.secret_key), tenants)
        return replace(self.order, producer_keys=keys)

    async def _send(self, sends: Sequence[Send]) -> list[Report]:
        if not sends:
            return []
        if self.wish.dry_run:
            return [Report(each.letter, "would_replay", _to(each.topic, each.partition)) for each in sends]
        async with transaction(self.pool, "mark replays") as connection:
            await self.marks.begin(connection, [each.letter for each in sends])
        answers = await asyncio.gather(*map(self._send_one, sends), return_exceptions=True)
        pairs = list(zip(sends, answers, strict=True))
        sent = [(each.letter, answer) for each, answer in pairs if isinstance(answer, str)]
        async with transaction(self.pool, "mark replays") as connection:
            await self.marks.sent(connection, [letter for letter, _ in sent], [to for _, to in sent])
        refused = [(each.letter, answer) for each, answer in pairs if isinstance(answer, BaseException)]
        for _, error in refused:
            if not isinstance(error, InputError):
                raise error
        return [Report(letter, "replayed", to) for letter, to in sent] + [
            Report(letter, "refused", reason=str(error)) for letter, error in refused
        ]

    async def _send_one(self, each: Send) -> str:
        with kafka.errors_translated(self.settings):
            sent = await self.producer.send_and_wait(
                each.topic, each.value, key=each.key, partition=each.partition, headers=list(each.headers)
            )
        return f"{sent.topic} {sent.partition}:{sent.offset}"


def _already(letter: Letter, mark: Mark) -> Report:
    return Report(
        letter, "already_replayed", mark.sent_to, f"sent back {mark.how_often} before; --again does it once more"
    )


def _to(topic: str, partition: int | None) -> str:
    return topic if partition is None else f"{topic} {partition}"
