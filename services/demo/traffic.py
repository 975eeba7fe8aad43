"""The demo's jobs on their way: produced to Kafka, received as webhooks, watched in Postgres."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from schemas.common import Lane
from services.client.producer import JobProducer
from services.demo.check import Row, Verdict, count_finished, judge, read_rows
from services.demo.plan import Job
from services.postgres.pool import Pool, transaction
from services.process.settings import Settings
from services.webhooks.receiver import WebhookReceiver

POLL_S = 0.2
# A first step on a busy machine may take long; nothing at all for this long means that something is broken.
STALLED_AFTER_S = 90.0

Receivers = Mapping[str, WebhookReceiver]


@dataclass(frozen=True)
class Arrived:
    """How far the jobs are: finished ones by adapter (None: the base), and webhooks with a good signature."""

    finished: Counter[str | None]
    webhooks: int

    @property
    def total(self) -> int:
        """Rises with everything that happens."""
        return self.finished.total() + self.webhooks

    def is_all_of(self, num_jobs: int) -> bool:
        """Whether every job has ended and sent its webhook."""
        return self.finished.total() >= num_jobs and self.webhooks >= num_jobs


@asynccontextmanager
async def receivers(secrets: Mapping[str, str]) -> AsyncIterator[Receivers]:
    """A webhook receiver for each tenant, which checks signatures with that tenant's secret."""
    async with AsyncExitStack() as stack:
        yield {tenant: await stack.enter_async_context(WebhookReceiver(secret)) for tenant, secret in secrets.items()}


async def produce(settings: Settings, jobs: Sequence[Job], to: Receivers) -> None:
    """Produce every job to its lane's topic; returns once the broker has acknowledged all."""
    async with JobProducer.from_settings(settings) as producer:
        for lane in Lane:
            await producer.send_all([job.request(to[job.tenant].url) for job in jobs if job.lane == lane], lane)


async def follow(
    pool: Pool, jobs: Sequence[Job], to: Receivers, on_progress: Callable[[Arrived], None]
) -> tuple[list[Row], Verdict]:
    """Watch until every job has ended and sent its webhook, or nothing has happened for STALLED_AFTER_S seconds."""
    last, stalled_at = -1, time.monotonic() + STALLED_AFTER_S
    while True:
        async with transaction(pool, "count the demo's jobs") as connection:
            finished = await count_finished(connection, jobs)
        arrived = Arrived(finished, sum(len(receiver.verified) for receiver in to.values()))
        on_progress(arrived)
        if arrived.total != last:
            last, stalled_at = arrived.total, time.monotonic() + STALLED_AFTER_S
        if arrived.is_all_of(len(jobs)) or time.monotonic() > stalled_at:
            break
        await asyncio.sleep(POLL_S)
    async with transaction(pool, "read the demo's rows") as connection:
        rows = await read_rows(connection, jobs)
    return rows, judge(jobs, rows, {tenant: receiver.received for tenant, receiver in to.items()})
