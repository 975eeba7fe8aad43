"""`loraq dlq replay`: reads, plans, marks, sends and marks again, one batch of dead letters at a time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from schemas.common import Lane
from services.dlq.dead_letters import DeadLetter, dead_letter_of
from services.dlq.edits import Edit
from services.dlq.filters import DeadLetterFilter
from services.dlq.marks import Mark, Marks
from services.dlq.plan import RecordToSend, Refusal, ReplayOptions, plan
from services.errors import InputError
from services.kafka import clients as kafka
from services.kafka.reading import partitions_of, scan
from services.parsing.validation import stated_identity
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import producer_keys, require_tenant

BATCH = 100


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What the command requests. `again` includes dead letters that were replayed before."""

    matching: DeadLetterFilter
    edit: Edit
    lane: Lane | None
    limit: int
    force: bool
    sign: bool
    again: bool
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The result for one dead letter: replayed, would_replay, already_replayed or refused."""

    letter: DeadLetter
    outcome: str
    to: str | None = None
    reason: str | None = None


async def replay(settings: Settings, request: ReplayRequest) -> AsyncGenerator[list[Report], None]:
    """Replay the matching dead letters, oldest first within each partition; yields reports batch by batch.

    Ends after `request.limit` sent or refused dead letters. Raises InputError if the filter names an unknown tenant,
    unless forced or edited, because the records would be dead-lettered again. Raises RetryableError if Kafka or
    Postgres fails; what was sent is marked, so the same command continues from there.
    """
    options = await _options(settings, request)
    marks = Marks(await kafka.cluster_id(settings), settings.dead_topic)
    producer = kafka.producer(
        settings, client_id="loraq-replay", max_request_size=kafka.MAX_DEAD_RECORD_BYTES, compression="gzip"
    )
    async with open_pool(settings) as pool:
        run = _Run(settings, request, options, pool, marks, producer)
        try:
            await _check_tenant(pool, request)
            with kafka.starting(settings):
                await producer.start()
            async with aclosing(_batches(settings, request)) as batches:
                left = request.limit
                async for batch in batches:
                    reports = await run.batch(batch, left)
                    yield reports
                    left -= sum(report.outcome != "already_replayed" for report in reports)
                    if left <= 0:
                        return
        finally:
            await producer.stop()


async def _check_tenant(pool: Pool, request: ReplayRequest) -> None:
    tenant_is_edited = request.edit.value is not None or any(path == "tenant" for path, _ in request.edit.sets)
    if request.matching.tenant is None or request.force or tenant_is_edited:
        return
    async with transaction(pool, "look up the tenant") as connection:
        await require_tenant(connection, request.matching.tenant)


async def _options(settings: Settings, request: ReplayRequest) -> ReplayOptions:
    lanes = [request.lane] if request.lane else list(Lane)
    topics = {
        settings.jobs_topic(lane): len(await partitions_of(settings, settings.jobs_topic(lane))) for lane in lanes
    }
    return ReplayOptions(
        topics=topics,
        to_topic=settings.jobs_topic(request.lane) if request.lane else None,
        edit=request.edit,
        force=request.force,
        sign=request.sign,
        require_signature=settings.require_signed_jobs,
    )


async def _batches(settings: Settings, request: ReplayRequest) -> AsyncGenerator[list[DeadLetter], None]:
    """The matching dead letters in batches; raises InputError if a whole new value would apply to several."""
    matching, batch, only_one = request.matching, [], request.edit.value is not None
    async with aclosing(
        scan(settings, settings.dead_topic, since=matching.since, partitions=matching.partitions)
    ) as read:
        async for message in read:
            letter = dead_letter_of(message)
            if not matching.matches(letter):
                continue
            batch.append(letter)
            if only_one and len(batch) > 1:
                raise InputError("--edit applies to one dead letter, but several match; select one with --letter")
            if len(batch) == BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


@dataclass(slots=True)
class _Run:
    settings: Settings
    request: ReplayRequest
    options: ReplayOptions
    pool: Pool
    marks: Marks
    producer: Any

    async def batch(self, letters: Sequence[DeadLetter], limit: int) -> list[Report]:
        """Replay a batch, at most `limit` dead letters of it."""
        async with transaction(self.pool, "look up replays") as connection:
            known = await self.marks.of(connection, letters)
            options = await self._with_keys(connection, letters)
        done = {position for position, mark in known.items() if mark.sent_at is not None and not self.request.again}
        plans = [plan(letter, options) for letter in letters if letter.position not in done][:limit]
        return [
            *[_already_replayed(letter, known[letter.position]) for letter in letters if letter.position in done],
            *[Report(each.letter, "refused", reason=each.reason) for each in plans if isinstance(each, Refusal)],
            *await self._send([each for each in plans if isinstance(each, RecordToSend)]),
        ]

    async def _with_keys(self, connection: Any, letters: Sequence[DeadLetter]) -> ReplayOptions:
        """The options with the tenants' keys, if edited records are to be signed."""
        if not self.request.sign:
            return self.options
        tenants = {letter.tenant for letter in letters if letter.tenant}
        tenants |= {str(content) for path, content in self.request.edit.sets if path == "tenant"}
        tenants |= {tenant for tenant in [stated_identity(None, self.request.edit.value)[0]] if tenant}
        keys = await producer_keys(connection, SecretBox(self.settings.secret_key), tenants)
        return replace(self.options, producer_keys=keys)

    async def _send(self, sends: Sequence[RecordToSend]) -> list[Report]:
        if not sends:
            return []
        if self.request.dry_run:
            return [Report(each.letter, "would_replay", _to(each.topic, each.partition)) for each in sends]
        async with transaction(self.pool, "mark replays") as connection:
            await self.marks.begin(connection, [each.letter for each in sends])
        results = await asyncio.gather(*map(self._send_one, sends), return_exceptions=True)
        pairs = list(zip(sends, results, strict=True))
        sent = [(each.letter, result) for each, result in pairs if isinstance(result, str)]
        async with transaction(self.pool, "mark replays") as connection:
            await self.marks.sent(connection, [letter for letter, _ in sent], [to for _, to in sent])
        refused = [(each.letter, result) for each, result in pairs if isinstance(result, BaseException)]
        for _, error in refused:
            if not isinstance(error, InputError):
                raise error
        return [Report(letter, "replayed", to) for letter, to in sent] + [
            Report(letter, "refused", reason=str(error)) for letter, error in refused
        ]

    async def _send_one(self, each: RecordToSend) -> str:
        with kafka.errors_translated(self.settings):
            sent = await self.producer.send_and_wait(
                each.topic, each.value, key=each.key, partition=each.partition, headers=list(each.headers)
            )
        return f"{sent.topic} {sent.partition}:{sent.offset}"


def _already_replayed(letter: DeadLetter, mark: Mark) -> Report:
    reason = f"already replayed {mark.how_often}; give --again to replay it again"
    return Report(letter, "already_replayed", mark.sent_to, reason)


def _to(topic: str, partition: int | None) -> str:
    return topic if partition is None else f"{topic} {partition}"
