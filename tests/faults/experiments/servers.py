"""Rows 9, 10 and 11: the broker or the database is down, at the worst moment or for a long time."""

import asyncio

from tests.faults.experiment import experiment
from tests.faults.proxy import Proxy
from tests.faults.run import Run
from tests.faults.service import Service

MIB = 1024 * 1024
# The dispatcher retries recording a delivered webhook for six seconds; as in the product, the claim must not expire
# before that.
CLAIM_SLACK_S = 12.0
# A completion is one statement in its own transaction; of all that a worker sends, only its arguments contain this.
COMPLETION = b"\x00\x00\x00\x09succeeded"
FLAT_MIB = 4.0
LONG_OUTAGE_S = 125.0


@experiment(
    "9",
    "broker killed and restarted under load",
    "nothing lost; consumer and producer recover without a restart",
    alone=True,
)
async def broker_restarted(run: Run) -> None:
    async with run.dispatcher() as dispatcher, run.worker() as worker:
        async with run.traffic.flowing(run.count, per_s=60, latency_ms=(20, 200)):
            await run.wait_ended(run.random.randint(20, 100))
            run.stack.kafka.kill()
            await asyncio.sleep(run.random.uniform(0.5, 4.0))
            run.stack.kafka.launch()
            await asyncio.to_thread(run.stack.kafka.wait_ready)
        await run.wait_settled()
        run.expect(worker.alive and dispatcher.alive, "a process ended with the broker")
    acknowledged, repeats = len(run.acknowledged_jobs()), sum(sent.place is None for sent in run.traffic.sent)
    run.expect(acknowledged == run.count, f"only {acknowledged} of {run.count} jobs were acknowledged")
    run.notes.append(f"{repeats} records not acknowledged and sent again")


@experiment(
    "10",
    "Postgres killed at commit; commit sent and reply lost",
    "the outcome is read back; one row; the connection pool refills",
    claim_slack_s=CLAIM_SLACK_S,
    alone=True,
)
async def commit_in_doubt(run: Run) -> None:
    kill = run.seed % 2 == 1
    postgres = run.stack.postgres
    async with Proxy(postgres.port) as proxy, run.dispatcher(), run.worker(database_url=run.through(proxy)) as worker:
        at_completion = postgres.kill if kill else lambda: None
        lost = proxy.lose_reply(COMPLETION, hit=run.random.randint(3, 20), then=at_completion)
        await run.traffic.send(run.count)
        await asyncio.wait_for(lost.wait(), 60.0)
        if kill:
            postgres.launch()
            await asyncio.to_thread(postgres.wait_ready)
        for _ in range(run.random.randint(1, 3)):
            lost = proxy.lose_reply(COMPLETION, hit=run.random.randint(1, 5))
            await run.traffic.send(20)
            await asyncio.wait_for(lost.wait(), 60.0)
        await run.wait_settled()
        run.expect(worker.alive, "the worker ended with its database connection")
        await run.wait_until(lambda: is_ready(worker), "the worker to be ready again", 30.0)
    run.notes.append("server killed, then replies lost" if kill else "replies lost")


async def is_ready(worker: Service) -> bool:
    """Whether /readyz reports ready."""
    return '"ready": true' in await worker.unready_reasons()


@experiment(
    "11",
    "Postgres down (for two minutes with the first seed)",
    "consumption pauses, memory flat, offsets do not move, recovers on its own",
    database_timeout_s=5.0,
    claim_slack_s=CLAIM_SLACK_S,
    timeout_s=400.0,
    max_backlog_jobs=200,
    alone=True,
)
async def database_away(run: Run) -> None:
    down_s = LONG_OUTAGE_S if run.seed == 1 else run.random.uniform(6.0, 14.0)
    async with run.dispatcher() as dispatcher, run.worker() as worker:
        async with run.traffic.flowing(run.count, per_s=100, latency_ms=(20, 100)):
            await run.wait_ended(run.random.randint(30, 150))
            run.stack.postgres.kill()
            await run.wait_until(lambda: reports_database(worker), "the worker to notice", 60.0)
            await asyncio.sleep(2.0)
            offsets = await run.uncommitted()
            await asyncio.sleep(down_s / 2)
            halfway = worker.memory_bytes()
            await asyncio.sleep(down_s / 2)
            after, later = worker.memory_bytes(), await run.uncommitted()
            paused = await worker.metric("loraq_partitions_paused")
            run.stack.postgres.start()
        await run.wait_settled()
        run.expect(worker.alive and dispatcher.alive, "a process ended with the database")
        await run.wait_until(lambda: is_ready(worker), "the worker to be ready again", 30.0)
    moved = {place.partition: place.offset for place in offsets}
    still = all(moved.get(place.partition, place.offset) == place.offset for place in later)
    run.expect(still, "an offset moved while the database was down")
    run.expect(paused > 0, "no partition was paused")
    grew = (after - halfway) / MIB
    run.expect(grew < FLAT_MIB, f"memory grew by {grew:.1f} MiB in the second half of {down_s:.0f} s")
    run.notes.append(f"down {down_s:.0f} s, memory {grew:+.1f} MiB in the second half")


async def reports_database(worker: Service) -> bool:
    """Whether /readyz reports the database as unavailable."""
    return '"database"' in await worker.unready_reasons()
