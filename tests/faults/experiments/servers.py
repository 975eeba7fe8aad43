"""Rows 9, 10 and 11: the broker and the database go away, in the worst moment or for long."""

import asyncio

from tests.faults.experiment import experiment
from tests.faults.proxy import Proxy
from tests.faults.run import Run
from tests.faults.service import Service

MIB = 1024 * 1024
# A webhook that was taken is written down again and again for six seconds; its claim must not lapse before, as the
# product's never does.
CLAIM_SLACK_S = 12.0
# A completion is one statement, a transaction by itself: of all that a worker sends, only its arguments hold this text.
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
            await run.ended(run.random.randint(20, 100))
            run.stack.kafka.kill()
            await asyncio.sleep(run.random.uniform(0.5, 4.0))
            run.stack.kafka.launch()
            await asyncio.to_thread(run.stack.kafka.wait_ready)
        await run.settled()
        run.expect(worker.alive and dispatcher.alive, "a process ended with the broker")
    acknowledged, repeats = len(run.wanted()), sum(sent.place is None for sent in run.traffic.sent)
    run.expect(acknowledged == run.count, f"{acknowledged} of {run.count} jobs were acknowledged in the end")
    run.notes.append(f"{repeats} records not acknowledged and sent again")


@experiment(
    "10",
    "Postgres killed at commit; commit sent and reply lost",
    "the outcome is read back; one row; the pool returns to full",
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
        await run.settled()
        run.expect(worker.alive, "the worker ended with the database's connection")
        await run.until(lambda: is_ready(worker), "the worker to be ready again", 30.0)
    run.notes.append("server killed, then replies lost" if kill else "replies lost")


async def is_ready(worker: Service) -> bool:
    """What /readyz says."""
    return '"ready": true' in await worker.unready_reasons()


@experiment(
    "11",
    "Postgres away (for two minutes with the first seed)",
    "consumption pauses, memory flat, offsets still, recovers by itself",
    database_timeout_s=5.0,
    claim_slack_s=CLAIM_SLACK_S,
    timeout_s=400.0,
    max_backlog_jobs=200,
    alone=True,
)
async def database_away(run: Run) -> None:
    away_s = LONG_OUTAGE_S if run.seed == 1 else run.random.uniform(6.0, 14.0)
    async with run.dispatcher() as dispatcher, run.worker() as worker:
        async with run.traffic.flowing(run.count, per_s=100, latency_ms=(20, 100)):
            await run.ended(run.random.randint(30, 150))
            run.stack.postgres.kill()
            await run.until(lambda: says_database(worker), "the worker to notice", 60.0)
            await asyncio.sleep(2.0)
            offsets = await run.uncommitted()
            await asyncio.sleep(away_s / 2)
            halfway = worker.memory_bytes()
            await asyncio.sleep(away_s / 2)
            after, later = worker.memory_bytes(), await run.uncommitted()
            paused = await worker.metric("loraq_partitions_paused")
            run.stack.postgres.start()
        await run.settled()
        run.expect(worker.alive and dispatcher.alive, "a process ended with the database")
        await run.until(lambda: is_ready(worker), "the worker to be ready again", 30.0)
    moved = {place.partition: place.offset for place in offsets}
    still = all(moved.get(place.partition, place.offset) == place.offset for place in later)
    run.expect(still, "an offset moved while the database was away")
    run.expect(paused > 0, "no partition was paused")
    grew = (after - halfway) / MIB
    run.expect(grew < FLAT_MIB, f"memory grew by {grew:.1f} MiB in the second half of {away_s:.0f} s")
    run.notes.append(f"away {away_s:.0f} s, memory {grew:+.1f} MiB in the second half of it")


async def says_database(worker: Service) -> bool:
    """Whether it knows that the database is away."""
    return '"database"' in await worker.unready_reasons()
