"""A pool with a tenant and adapters, and access to its topics and tables, for tests of the worker."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas.common import Lane
from services.adapters.base import load_base
from services.adapters.push import inspect, push
from services.client.identifiers import uuid7
from services.kafka import clients as kafka
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.s3.store import ObjectStore, open_store
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.waiting import TIMEOUT_S, eventually

TENANT = "acme"
ADMIT = """
update loraq.adapters set status = $3, status_reason = $4, base_fingerprint = $5 where tenant = $1 and name = $2
"""
TERMINAL = ("succeeded", "failed", "cancelled", "expired")


@dataclass
class World:
    """Everything in one test's pool except the worker."""

    settings: Settings
    pool: Pool
    objects: ObjectStore
    producer: Any
    producer_key: str
    base_fingerprint: str | None
    ends: dict[TopicPartition, int] = field(default_factory=dict)

    async def add_adapter(
        self, directory: Path, name: str, *, status: str = "ready", reason: str | None = None, tenant: str = TENANT
    ) -> None:
        """Push a PEFT directory and give it a status, as the registrar would."""
        pushed = await push(self.pool, self.objects, tenant, name, inspect(directory, 2**30))
        async with transaction(self.pool) as connection:
            await connection.execute(ADMIT, tenant, pushed.name, status, reason, self.base_fingerprint)

    async def send(
        self,
        value: dict[str, Any] | bytes | None,
        *,
        lane: Lane = Lane.STANDARD,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Any:
        """Produce one record unchanged; returns the broker's metadata for it."""
        encoded = json.dumps(value).encode() if isinstance(value, dict) else value
        topic = self.settings.jobs_topic(lane)
        sent = await self.producer.send_and_wait(topic, encoded, key=key, headers=list(headers), partition=partition)
        place = TopicPartition(sent.topic, sent.partition)
        self.ends[place] = max(sent.offset + 1, self.ends.get(place, 0))
        return sent

    async def send_job(self, *, lane: Lane = Lane.STANDARD, **fields: Any) -> UUID:
        """Produce one job request; returns its job_id."""
        job_id = uuid7()
        request = job_request(**fields)
        adapter = request.get("adapter")
        key = f"{request['tenant']}/{adapter}".encode() if adapter else None
        await self.send(request | {"job_id": str(job_id)}, lane=lane, key=key)
        return job_id

    async def rows(self, statement: str, *arguments: Any) -> list[dict[str, Any]]:
        """The rows of a query."""
        async with self.pool.acquire() as connection:
            return [dict(row) for row in await connection.fetch(statement, *arguments)]

    async def jobs(self) -> dict[UUID, dict[str, Any]]:
        """Every row of `jobs`, by job_id."""
        rows = await self.rows("select * from loraq.jobs")
        assert len({row["job_id"] for row in rows}) == len(rows), "a job has two rows"
        return {row["job_id"]: row for row in rows}

    async def ended(self, *job_ids: UUID, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """The rows of these jobs, once all of them are terminal."""

        async def rows() -> list[dict[str, Any]] | None:
            found = await self.jobs()
            missing = [job_id for job_id in job_ids if found.get(job_id, {}).get("state") not in TERMINAL]
            assert not missing, f"{len(missing)} of {len(job_ids)} jobs are not terminal, for example {missing[0]}"
            return [found[job_id] for job_id in job_ids]

        return await eventually(rows, timeout_s, "all jobs to end") if job_ids else []

    async def results(self) -> dict[UUID, dict[str, Any]]:
        """Every row of `results`, by job_id."""
        rows = await self.rows("select * from loraq.results")
        assert len({row["job_id"] for row in rows}) == len(rows), "a job has two results"
        return {row["job_id"]: row for row in rows}

    async def dead_letters(self, count: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """The first `count` records of the dead-letter topic."""
        consumer = AIOKafkaConsumer(
            self.settings.dead_topic, auto_offset_reset="earliest", **kafka.client_options(self.settings)
        )
        await consumer.start()
        found: list[Any] = []

        async def enough() -> bool:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found.extend(records)
            return len(found) >= count

        try:
            await eventually(enough, timeout_s, f"{count} dead letters")
        finally:
            await consumer.stop()
        return found

    async def lag(self) -> int:
        """Number of records sent by `send` that the group has not committed yet.

        The end offsets come from acknowledgements: the embedded broker may report older ones.
        """
        async with kafka.admin(self.settings) as admin:
            committed = await admin.list_consumer_group_offsets(
                self.settings.consumer_group, partitions=list(self.ends)
            )
        return sum(end - max(0, committed[place].offset) for place, end in self.ends.items())


def job_request(**fields: Any) -> dict[str, Any]:
    """A small valid request; fields may be replaced."""
    request: dict[str, Any] = {"tenant": TENANT, "prompt": "the rain in the north", "sampling": {"max_tokens": 8}}
    return request | fields


def header(record: Any, name: str) -> str:
    """The last header of that name, as text."""
    return [value.decode() for key, value in record.headers if key == name][-1]


@asynccontextmanager
async def open_world(settings: Settings) -> AsyncIterator[World]:
    """Topics, a tenant and connections."""
    await kafka.ensure_topics(settings)
    producer = kafka.producer(settings)
    async with open_pool(settings) as pool, open_store(settings) as objects:
        async with transaction(pool) as connection:
            tenant = await add_tenant(connection, SecretBox(settings.secret_key), TENANT)
        await producer.start()
        try:
            base = load_base(settings) if settings.base_model else None
            fingerprint = base.fingerprint if base else None
            yield World(settings, pool, objects, producer, tenant.producer_key, fingerprint)
        finally:
            await producer.stop()
