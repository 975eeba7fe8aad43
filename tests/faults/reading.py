"""Read the state that a run left behind: tables, topics, offsets."""

import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition

from services.kafka import clients as kafka
from services.postgres.pool import Pool, transaction
from services.process.settings import Settings
from services.worker.offsets.ledger import Partition, Place
from tests.faults.checker import TERMINAL
from tests.faults.recorder import output_of
from tests.faults.snapshot import DeadLetter, Delivery, Effect, Event, Job, Key, Result, Usage

JOBS = """
select tenant, job_id, state, attempts, fence, worker, error_code, coalesce(adapter, '') as adapter,
    coalesce(adapter_version, 0) as adapter_version,
    extract(epoch from pg_xact_commit_timestamp(jobs.xmin))::float8 as committed_at
from loraq.jobs
"""
RESULTS = """
select tenant, job_id, coalesce(output_text, output_url) as output, prompt_tokens, cached_tokens, completion_tokens,
    total_ms, extract(epoch from pg_xact_commit_timestamp(results.xmin))::float8 as committed_at
from loraq.results
"""
OUTBOX = "select event_id, kind, tenant, job_id, state from loraq.outbox"
DELIVERIES = """
select webhook_id, tenant, job_id, attempt, outcome, extract(epoch from started_at)::float8 as began_at
from loraq.webhook_deliveries order by id
"""
USAGE = """
select tenant, adapter, adapter_version, sum(jobs)::int as jobs, sum(prompt_tokens)::int as prompt_tokens,
    sum(cached_tokens)::int as cached_tokens, sum(completion_tokens)::int as completion_tokens,
    sum(wasted_tokens)::int as wasted_tokens
from loraq.usage_hourly group by 1, 2, 3
"""
SETTLED = """
select tenant, job_id from loraq.jobs where state in ('succeeded', 'failed', 'cancelled', 'expired', 'parked')
union
select tenant, job_id from loraq.parked_jobs  -- also of a job that another worker still has in flight
"""
PENDING = "select count(*) from loraq.outbox where state = 'pending'"
ENDED = """
select count(*) from loraq.jobs where state in ('succeeded', 'failed', 'cancelled', 'expired')
"""
UNFINISHED = """
select count(*) from loraq.jobs where state not in ('succeeded', 'failed', 'cancelled', 'expired')
"""


class Tables:
    """The tables of a run. Raises RetryableError while the database is down."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def rows(self, statement: str, *arguments: Any) -> list[dict[str, Any]]:
        """The rows of a query."""
        async with transaction(self.pool, "read a run's tables") as connection:
            return [dict(row) for row in await connection.fetch(statement, *arguments)]

    async def execute(self, statement: str) -> None:
        """Execute a statement that returns no rows."""
        async with transaction(self.pool, "set up a run") as connection:
            await connection.execute(statement)

    async def number(self, statement: str, *arguments: Any) -> int:
        """The single number that a query returns."""
        [row] = await self.rows(statement, *arguments)
        return int(next(iter(row.values())) or 0)

    async def jobs(self) -> tuple[Job, ...]:
        return tuple(Job(**keyed(row)) for row in await self.rows(JOBS))

    async def results(self) -> tuple[Result, ...]:
        return tuple(Result(**keyed(row)) for row in await self.rows(RESULTS))

    async def outbox(self) -> tuple[Effect, ...]:
        return tuple(Effect(**keyed(row)) for row in await self.rows(OUTBOX))

    async def deliveries(self) -> tuple[Delivery, ...]:
        return tuple(Delivery(**keyed(row)) for row in await self.rows(DELIVERIES))

    async def usage(self) -> tuple[Usage, ...]:
        return tuple(Usage(**row) for row in await self.rows(USAGE))

    async def ended(self) -> set[Key]:
        """Keys of the terminal jobs."""
        return {job.key for job in await self.jobs() if job.state in TERMINAL}

    async def settled(self) -> set[Key]:
        """Keys of the jobs whose offsets may be committed: terminal or durably parked."""
        return {Key(row["tenant"], row["job_id"]) for row in await self.rows(SETTLED)}


def keyed(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its tenant and job_id as one key."""
    rest = {name: value for name, value in row.items() if name not in ("tenant", "job_id")}
    return {"key": Key(row["tenant"], row["job_id"]), **rest}


async def committed_offsets(admin: Any, settings: Settings, places: Collection[TopicPartition]) -> dict[Any, int]:
    """The group's committed offset of each partition; 0 where there is none."""
    found = await admin.list_consumer_group_offsets(settings.consumer_group, partitions=list(places))
    return {place: max(0, found[place].offset) if place in found else 0 for place in places}


@asynccontextmanager
async def reader(settings: Settings, topic: str) -> AsyncIterator[Any]:
    """A consumer without a group, at the beginning of all partitions of a topic of the pool."""
    consumer = AIOKafkaConsumer(**kafka.client_options(settings), auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, number) for number in range(settings.partitions)])
        yield consumer
    finally:
        await consumer.stop()


async def read_to_end(consumer: Any) -> list[Any]:
    """Every record up to the current end offsets."""
    ends = await consumer.end_offsets(consumer.assignment())
    records: list[Any] = []
    while any([await consumer.position(place) < end for place, end in ends.items()]):
        for batch in (await consumer.getmany(timeout_ms=100)).values():
            records += batch
    return records


def dead_letter_of(record: Any) -> DeadLetter:
    """A record of the dead-letter topic, with its origin from the headers."""
    headers = {name: value.decode() for name, value in record.headers if name.startswith("loraq-") and value}
    partition = Partition(headers["loraq-source-topic"], int(headers["loraq-source-partition"]))
    return DeadLetter(Place(partition, int(headers["loraq-source-offset"])), headers["loraq-error-code"])


def event_of(record: Any) -> Event:
    """A record of the events topic."""
    event = json.loads(record.value)
    data = event["data"]
    return Event(
        event_id=UUID(event["id"]),
        key=Key(data["tenant"], UUID(data["job_id"])),
        state=data["state"],
        output=output_of(data),
        at=record.timestamp / 1000,
    )
