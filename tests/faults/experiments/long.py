"""Extras, which run only when named: repeated kills for five minutes, and a backlog of a million messages."""

import asyncio
import json
import time
from dataclasses import dataclass

from confluent_kafka import Producer

from schemas.common import Lane
from services.adapters.push import inspect, push
from services.client.identifiers import uuid7
from services.s3.store import open_store
from tests.builders import lora_adapter
from tests.faults.engine import prompt_of
from tests.faults.experiment import experiment
from tests.faults.run import Run, open_run
from tests.faults.snapshot import Key
from tests.faults.stack import ADMIT

MIB = 1024 * 1024
KILL_EVERY_S = 20.0
KILLS = 15
SMALL_BACKLOG = 50_000  # more than a worker prefetches
NUM_ADAPTERS = 500
SERVED = 4_000
SLOWER, SLACK_S = 1.5, 2.0
GROWTH_BYTES = 32 * MIB
IN_ENGINE = "select count(*) from loraq.jobs where state = 'running' and worker = $1"


@experiment(
    "kills",
    "two workers, one killed every 20 s for five minutes",
    "engine calls at most jobs + kills x jobs in flight at a kill",
    jobs=15_000,
    timeout_s=900.0,
    extra=True,
    alone=True,
)
async def repeated_kills(run: Run) -> None:
    in_flight: list[int] = []
    per_s = run.count / (KILLS * KILL_EVERY_S)
    async with run.dispatcher(), run.worker() as first, run.worker() as second:
        workers = [first, second]
        async with run.traffic.flowing(run.count, per_s=per_s, latency_ms=(100, 800)):
            started = time.monotonic()
            for number in range(KILLS):
                await asyncio.sleep(started + (number + 1) * KILL_EVERY_S - time.monotonic())
                victim = workers[number % 2]
                in_flight.append(await run.tables.number(IN_ENGINE, victim.name))
                victim.process.kill()
                workers[number % 2] = run.start("worker")
                await workers[number % 2].wait_ready()
        await run.wait_settled(300.0)
        for worker in workers:
            if worker.alive:
                await worker.stop()
    found, most = len(run.calls()), max(in_flight)
    allowed = run.count + KILLS * most
    run.expect(found <= allowed, f"{found} engine calls, but the kills explain at most {allowed}")
    run.notes.append(
        f"{KILLS} kills, {sum(in_flight)} jobs in flight at the kills, {found - run.count} repeated engine calls"
    )


@dataclass(frozen=True)
class Startup:
    """How a worker started with a backlog: seconds until it was ready and until `SERVED` jobs had ended, and its
    resident memory at that point."""

    ready_s: float
    served_s: float
    memory_bytes: int

    def __str__(self) -> str:
        served = f"{SERVED} jobs finished after {self.served_s:.1f} s"
        return f"ready after {self.ready_s:.1f} s, {served}, {self.memory_bytes / MIB:.0f} MiB"


@experiment(
    "backlog",
    "a backlog of 1,000,000 messages with 500 adapters",
    "start-up time and memory do not grow with it",
    jobs=1_000_000,
    timeout_s=1200.0,
    extra=True,
    checked=False,
    alone=True,
)
async def deep_backlog(run: Run) -> None:
    small, large = await start_with_backlog(run, SMALL_BACKLOG), await start_with_backlog(run, run.count)
    run.notes += [f"{SMALL_BACKLOG:,}: {small}", f"{run.count:,}: {large}"]
    run.expect(large.ready_s <= SLOWER * small.ready_s + SLACK_S, "start-up took longer with the large backlog")
    run.expect(large.served_s <= SLOWER * small.served_s + SLACK_S, "the first jobs took longer with the large backlog")
    run.expect(large.memory_bytes - small.memory_bytes < GROWTH_BYTES, "memory grew with the backlog")


async def start_with_backlog(run: Run, depth: int) -> Startup:
    """Start a worker with a backlog of `depth` messages."""
    async with open_run(run.stack, f"backlog-{depth}", run.seed, depth) as deep:
        await add_adapters(deep)
        await asyncio.to_thread(fill, deep, depth)
        started = time.monotonic()
        async with deep.worker(cache_dir=deep.directory / "cache") as worker:  # a cold cache for both backlogs
            ready_s = time.monotonic() - started
            await deep.wait_ended(SERVED, 300.0)
            return Startup(ready_s, time.monotonic() - started, worker.memory_bytes())


async def add_adapters(run: Run) -> None:
    """Add 500 adapters with different weights."""
    async with open_store(run.settings) as store:
        for number in range(NUM_ADAPTERS):
            directory = run.directory / "adapters" / str(number)
            lora_adapter(directory, run.stack.base_model(), rank=1, targets=("q_proj",), layers=(0,), seed=number)
            await push(run.tables.pool, store, "acme", f"many-{number}", inspect(directory, 2**30))
    await run.tables.execute(ADMIT)


def fill(run: Run, depth: int) -> None:
    """Produce the backlog; blocks."""
    options = {"acks": "all", "linger.ms": 20, "queue.buffering.max.messages": 200_000}
    producer = Producer({"bootstrap.servers": run.settings.kafka_bootstrap, **options})
    for number in range(depth):
        key, adapter = Key("acme", uuid7()), f"many-{number % NUM_ADAPTERS}"
        prompt = prompt_of(key, 5)
        request = {"tenant": "acme", "job_id": str(key.job_id), "adapter": adapter, "prompt": prompt}
        while True:
            try:
                producer.produce(run.settings.jobs_topic(Lane.STANDARD), json.dumps(request), key=f"acme/{adapter}")
            except BufferError:
                producer.poll(0.2)
            else:
                break
    producer.flush(120.0)
