"""A tenant in a fresh database, its outbox, and a dispatcher running in the test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest

from services.dispatcher.app import serve
from services.kafka.clients import ensure_topics
from services.postgres.pool import Pool, open_pool
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.tenants.secrets import SecretBox, new_webhook_secret

TENANT = "acme"
BODY = '{"type":"job.succeeded","timestamp":"2026-12-01T12:00:00Z","data":{"output_text":"grüße"}}'

INSERT_TENANT = "insert into loraq.tenants (tenant, webhook_secret, producer_key) values ($1, $2, $3)"
INSERT_OUTBOX = """
insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body, target, traceparent)
values ($1, $2, $3, $4, $5, 'job.succeeded', $6, $7, $8) returning id
"""


@dataclass
class World:
    """The database of one test, with the rows that a worker would write."""

    settings: Settings
    database: Pool
    secret: str

    async def add_tenant(self, tenant: str, secret: str) -> None:
        box = SecretBox(self.settings.secret_key)
        await self.database.execute(INSERT_TENANT, tenant, box.seal(secret.encode()), box.seal(b"key"))

    async def add(
        self, kind: str, target: str = "", *, tenant: str = TENANT, body: str = BODY, traceparent: str | None = None
    ) -> UUID:
        """Insert one outbox row and notify the dispatcher; returns the row's event_id."""
        event_id, job_id = uuid4(), uuid4()
        row = (event_id, kind, tenant, job_id, self.settings.pool, body, target, traceparent)
        async with self.database.acquire() as connection, connection.transaction():
            await connection.execute(INSERT_OUTBOX, *row)
            await connection.execute("select pg_notify('loraq_outbox', '')")
        return event_id

    async def add_webhook(self, url: str, **more: str) -> UUID:
        return await self.add("webhook", url, **more)

    async def state(self, event_id: UUID) -> str:
        return str(await self.database.fetchval("select state from loraq.outbox where event_id = $1", event_id))

    async def deliveries(self, event_id: UUID) -> list[dict[str, object]]:
        """The attempts of a webhook in order."""
        rows = await self.database.fetch(
            "select * from loraq.webhook_deliveries where webhook_id = $1 order by id", event_id
        )
        return [dict(row) for row in rows]

    async def outcomes(self, event_id: UUID) -> list[str]:
        return [str(row["outcome"]) for row in await self.deliveries(event_id)]


@asynccontextmanager
async def make_world(settings: Settings) -> AsyncIterator[World]:
    await ensure_topics(settings)
    async with open_pool(settings) as database:
        world = World(settings, database, new_webhook_secret())
        await world.add_tenant(TENANT, world.secret)
        yield world


def quick(settings: Settings, **changes: object) -> Settings:
    """Settings that allow loopback and retry at once."""
    update = {"webhook_allow_networks": ("127.0.0.0/8", "::1/128"), "webhook_retry_delays_s": (0.01,)}
    return settings.model_copy(update=update | changes)


@asynccontextmanager
async def dispatching(settings: Settings) -> AsyncIterator[Lifecycle]:
    """A dispatcher that runs until the block ends; fails if it ends earlier."""
    life = Lifecycle()
    serving = asyncio.create_task(serve(life, settings))
    try:
        yield life
    finally:
        life.stop.set()
        await serving
    assert life.failure is None


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    async with make_world(quick(settings, webhook_timeout_s=5.0)) as world:
        yield world


Dispatching = Callable[[Settings], AbstractAsyncContextManager[Lifecycle]]
