"""Other consumers for comparison, with the records of the run, each in its own process.

python -m services.bench.service.peers faststream COUNT WORKERS     validates with pydantic, writes one row per job
python -m services.bench.service.peers bare COUNT                   decodes JSON, writes two rows per job, 500 at a time

Both read the run's topic in their own group and write to their own tables, on the same broker and database. Each prints
one JSON object: the number of jobs, and the seconds from its first record to its last commit. SIGTERM ends it and drops
its tables.
"""

import asyncio
import json
import secrets
import sys
import time
from typing import Any

from schemas.job import JobRequest
from services.bench.termination import cancelled_by_sigterm
from services.kafka import clients as kafka
from services.postgres.pool import Pool, open_pool
from services.process.settings import Settings, load_settings

BATCH = 500
SCHEMA = "loraq_bench"  # a prefix: concurrent runs must not drop each other's tables
CREATE = """
create schema if not exists {schema};
create table {schema}.jobs (
    tenant text not null, job_id uuid not null, prompt text not null, primary key (tenant, job_id)
);
create table {schema}.results (
    tenant text not null, job_id uuid not null, output text not null, primary key (tenant, job_id)
);
"""
INSERT_ONE = "insert into {schema}.jobs (tenant, job_id, prompt) values ($1, $2, $3) on conflict do nothing"
INSERT_MANY = """
insert into {schema}.{table} select * from unnest($1::text[], $2::uuid[], $3::text[]) on conflict do nothing
"""


async def faststream(settings: Settings, pool: Pool, schema: str, count: int, workers: int) -> float:
    """A FastStream consumer as in its documentation; returns the seconds for `count` jobs.

    The decoder builds the model from the record's bytes, which saves the handler a second validation.
    """
    from faststream.kafka import KafkaBroker  # the command has checked that it is installed

    broker = KafkaBroker(settings.kafka_bootstrap, logger=None)
    done, start, handled = asyncio.Event(), 0.0, 0
    insert = INSERT_ONE.format(schema=schema)

    async def decode(message: Any) -> JobRequest:
        return JobRequest.model_validate_json(message.body)

    async def handle(job: JobRequest) -> None:
        nonlocal start, handled
        start = start or time.monotonic()
        await pool.execute(insert, job.tenant, job.job_id, job.prompt)
        handled += 1
        if handled >= count:
            done.set()

    subscribe = broker.subscriber(
        settings.jobs_topic(settings.lanes[0]),
        group_id=f"{settings.pool}.{schema}",
        auto_offset_reset="earliest",
        max_workers=workers,
        decoder=decode,
    )
    subscribe(handle)
    await broker.start()
    await done.wait()
    seconds = time.monotonic() - start
    await broker.stop()
    return seconds


async def bare(settings: Settings, pool: Pool, schema: str, count: int) -> float:
    """The upper limit: two rows per job without validation, states and fencing; returns seconds for `count` jobs."""
    consumer = kafka.job_consumer(settings.model_copy(update={"pool": f"{settings.pool}.{schema}"}))
    topic = settings.jobs_topic(settings.lanes[0])
    consumer.subscribe([topic])
    await consumer.start()
    await consumer.seek_to_beginning()  # the worker's consumer has no default position
    handled, start = 0, 0.0
    statements = [INSERT_MANY.format(schema=schema, table=table) for table in ("jobs", "results")]
    try:
        while handled < count:
            batches = await consumer.getmany(timeout_ms=1000, max_records=BATCH)
            start = start or time.monotonic()
            jobs = [json.loads(message.value) for messages in batches.values() for message in messages]
            if jobs:
                columns = [[job[name] for job in jobs] for name in ("tenant", "job_id", "prompt")]
                async with pool.acquire() as connection, connection.transaction():
                    for statement in statements:
                        await connection.execute(statement, *columns)
                await consumer.commit()
            handled += len(jobs)
        return time.monotonic() - start
    finally:
        await consumer.stop()


async def measure(name: str, count: int, workers: int) -> dict[str, object]:
    """Run one peer in its own schema, which is dropped afterwards, also if this is cancelled."""
    settings = load_settings()
    schema = f"{SCHEMA}_{secrets.token_hex(4)}"
    async with open_pool(settings) as pool:
        try:
            await pool.execute(CREATE.format(schema=schema))
            if name == "faststream":
                seconds = await faststream(settings, pool, schema, count, workers)
            else:
                seconds = await bare(settings, pool, schema, count)
            written = await pool.fetchval(f"select count(*) from {schema}.jobs")  # noqa: S608  # a name of our own
        finally:
            await pool.execute(f"drop schema if exists {schema} cascade")
    return {"jobs": written, "seconds": seconds}


def main(name: str, count: str, workers: str = "1") -> None:
    """Measure and print the result."""
    sys.stdout.write(json.dumps(asyncio.run(cancelled_by_sigterm(measure(name, int(count), int(workers))))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
