"""Produces the demo's jobs to Kafka, receives their webhooks and follows their rows in Postgres."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from schemas.common import Lane
from services.client.producer import JobProducer
from services.demo.check import CheckResult, Row, check, count_finished, read_rows
from services.demo.plan import Job
from services.postgres.pool import Pool, transaction
from services.process.settings import Settings
from services.webhooks.receiver import WebhookReceiver

POLL_S = 0.2
# The first engine step on a busy machine may be slow; no progress for this long means a failure.
STALLED_AFTER_S = 90.0

Receivers = Mapping[str, WebhookReceiver]


@dataclass(frozen=True)
class JobProgress:
    """Progress of the jobs: finished ones by adapter (None: the base model), and webhooks with a valid signature."""

    finished: Counter[str | None]
    webhooks: int

    @property
    def total(self) -> int:
        """Finished jobs plus verified webhooks; rises with every event."""
        return self.finished.total() + self.webhooks

    def is_complete(self, num_jobs: int) -> bool:
        """Whether every job has ended and sent its webhook."""
        return self.finished.total() >= num_jobs and self.webhooks >= num_jobs


@asynccontextmanager
async def receivers(secrets: Mapping[str, str]) -> AsyncIterator[Receivers]:
    """A webhook receiver for each tenant, which checks signatures with that tenant's secret."""
    async with AsyncExitStack() as stack:
        yield {tenant: await stack.enter_async_context(WebhookReceiver(secret)) for tenant, secret in secrets.items()}


async def produce(settings: Settings, jobs: Sequence[Job], to: Receivers) -> None:
    """Produce every job to its lane's topic; returns when the broker has acknowledged all."""
    async with JobProducer.from_settings(settings) as producer:
        for lane in Lane:
            await producer.send_all([job.request(to[job.tenant].url) for job in jobs if job.lane == lane], lane)


async def follow(
    pool: Pool, jobs: Sequence[Job], to: Receivers, on_progress: Callable[[JobProgress], None]
) -> tuple[list[Row], CheckResult]:
    """Wait until every job has ended and sent its webhook, or for STALLED_AFTER_S seconds without progress."""
    last, stalled_at = -1, time.monotonic() + STALLED_AFTER_S
    while True:
        async with transaction(pool, "count the demo's jobs") as connection:
            finished = await count_finished(connection, jobs)
        progress = JobProgress(finished, sum(len(receiver.verified) for receiver in to.values()))
        on_progress(progress)
        if progress.total != last:
            last, stalled_at = progress.total, time.monotonic() + STALLED_AFTER_S
        if progress.is_complete(len(jobs)) or time.monotonic() > stalled_at:
            break
        await asyncio.sleep(POLL_S)
    async with transaction(pool, "read the demo's rows") as connection:
        rows = await read_rows(connection, jobs)
    return rows, check(jobs, rows, {tenant: receiver.received for tenant, receiver in to.items()})
