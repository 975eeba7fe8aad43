"""A separate pool for one run: its topics and tenants are created before and removed with all rows afterwards."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka.errors import KafkaError

from services.errors import RetryableError
from services.kafka import clients as kafka
from services.postgres.pool import Pool, open_pool, transaction
from services.process import telemetry
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant

NUM_TENANTS = 8
# One statement per table, so that none exceeds the database's timeout.
REMOVALS = (
    "delete from loraq.parked_jobs where tenant = any($1::text[])",
    "delete from loraq.results where tenant = any($1::text[])",
    "delete from loraq.outbox where tenant = any($1::text[])",
    "delete from loraq.jobs where tenant = any($1::text[])",
    "delete from loraq.job_keys where tenant = any($1::text[])",
    "delete from loraq.usage_hourly where tenant = any($1::text[])",
    "delete from loraq.tenants where tenant = any($1::text[])",
)
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class BenchPool:
    """The settings, tenants and database of one run."""

    settings: Settings
    tenants: tuple[str, ...]
    database: Pool


@asynccontextmanager
async def open_bench_pool(settings: Settings) -> AsyncIterator[BenchPool]:
    """A new pool with topics and tenants, which are removed afterwards, also if the block is cancelled."""
    name = f"bench-{secrets.token_hex(4)}"
    own = settings.model_copy(update={"pool": name})
    tenants = tuple(f"{name}-{index}" for index in range(NUM_TENANTS))
    async with open_pool(own) as database:
        try:
            await kafka.ensure_topics(own)
            async with transaction(database, "add the benchmark's tenants") as connection:
                for tenant in tenants:
                    await add_tenant(connection, SecretBox(own.secret_key), tenant)
            yield BenchPool(own, tenants, database)
        finally:
            await _remove_topics(own)
            for statement in REMOVALS:
                await database.execute(statement, list(tenants))


async def _remove_topics(settings: Settings) -> None:
    names = [topic.name for topic in kafka.pool_topics(settings)]
    try:
        async with kafka.admin(settings) as client:
            await client.delete_topics(names)
    except (RetryableError, KafkaError, NotImplementedError) as error:  # NotImplementedError: the broker cannot
        _log.warning("Topics could not be removed", action="bench_topics_left", topics=names, reason=str(error))
