"""Rows 12, 13 and 23: bad input, an unusable dead-letter topic, and engines that die."""

import statistics

from aiokafka import TopicPartition
from aiokafka.admin import NewTopic

from services.kafka import clients as kafka
from tests.faults.experiment import experiment
from tests.faults.reading import committed_offsets
from tests.faults.run import Run, configure

SLOWER = 2.0
SLACK_MS = 150.0


@experiment(
    "12",
    "poison: not JSON, wrong schema, too long, unknown adapter, a job that kills the engine each time",
    "an error code for each; other jobs' latency unchanged; the killer job fails after its maximum number of attempts",
    alone=True,
)
async def poison(run: Run) -> None:
    third = run.count // 3
    async with run.dispatcher(), run.worker():
        alone = await run.traffic.send(third, latency_ms=(30, 60))
        await run.wait_settled()
        during = await run.traffic.send(third, latency_ms=(30, 60))
        for value in (b"not json", b'{"tenant": "acme"}', b"\xff" * 700_000, b"[" * 100_000, None):
            for partition in range(run.settings.partitions):
                await run.traffic.send_raw(value, partition=partition)
        await run.traffic.send_compressed(b" " * 20_000_000)
        unknown = [await run.traffic.send_job(10, adapter="never-pushed") for _ in range(20)]
        await run.wait_settled()
        killer = await run.traffic.send_job(10, fate=run.random.choice(("die", "crash")))
        await run.traffic.send(run.count - 2 * third)
        await run.wait_settled()
    rows = {job.key: job for job in await run.tables.jobs()}
    took = {result.key: result.total_ms for result in await run.tables.results()}
    before, with_poison = (percentile([took[key] for key in keys if key in took]) for keys in (alone, during))
    run.expect(
        with_poison <= SLOWER * before + SLACK_MS,
        f"with poison, other jobs took {with_poison:.0f} ms (p95) instead of {before:.0f}",
    )
    run.expect(
        {rows[key].error_code for key in unknown} == {"unknown_adapter"}, "an unknown adapter has another error code"
    )
    found = (rows[killer].state, rows[killer].error_code, rows[killer].attempts)
    expected = ("failed", "engine_error", run.settings.max_attempts)
    run.expect(found == expected, f"the killer ended as {found}, not {expected}")
    failed = [job for job in rows.values() if job.state != "succeeded" and job.key not in (*unknown, killer)]
    run.expect(not failed, f"{len(failed)} other jobs failed, {failed[0] if failed else ''}")
    run.notes.append(f"p95 {before:.0f} ms alone, {with_poison:.0f} ms with poison")


def percentile(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


@experiment(
    "13",
    "dead-letter topic missing or refusing records",
    "the offset does not move; alarm; all are dead-lettered once the topic is back",
)
async def dead_letters_refused(run: Run) -> None:
    missing = run.seed % 2 == 1
    topic = run.settings.dead_topic
    async with run.dispatcher(), run.worker() as worker:
        await run.traffic.send(run.count // 2)
        await run.wait_settled()
        await (remove(run, topic) if missing else limit(run, topic, "1"))
        behind = [await run.traffic.send_raw(b"not json at all", partition=n) for n in range(run.settings.partitions)]
        await run.traffic.send(run.count - run.count // 2)

        async def alarmed() -> bool:
            return await worker.metric("loraq_alarms_total", action="dead_letter_failed") > 0

        await run.wait_until(alarmed, "an alarm", 60.0)
        await run.wait_until(lambda: all_jobs_ended(run), "the jobs in parallel to end", 60.0)
        passed = await passed_over(run, [sent.place for sent in behind if sent.place is not None])
        await (restore(run, topic) if missing else limit(run, topic, str(kafka.MAX_DEAD_RECORD_BYTES)))
        await run.wait_settled()
        run.expect(worker.alive, "the worker ended")
    run.expect(not passed, f"offsets moved past {len(passed)} records that were not dead-lettered")
    run.notes.append("missing" if missing else "refusing")


async def all_jobs_ended(run: Run) -> bool:
    """Whether every acknowledged job is terminal."""
    return run.acknowledged_jobs() <= await run.tables.ended()


async def passed_over(run: Run, places: list) -> list:  # type: ignore[type-arg]
    """The places that the group's committed offsets have passed."""
    partitions = [TopicPartition(*place.partition) for place in places]
    async with kafka.admin(run.settings) as admin:
        committed = await committed_offsets(admin, run.settings, partitions)
    return [place for place in places if committed[TopicPartition(*place.partition)] > place.offset]


async def remove(run: Run, topic: str) -> None:
    """Delete the topic after recording its dead letters."""
    run.watch.dead_letters += await run.dead_letters()
    async with kafka.admin(run.settings) as admin:
        await admin.delete_topics([topic])


async def restore(run: Run, topic: str) -> None:
    """Recreate the topic with its configuration."""
    config = {"max.message.bytes": str(kafka.MAX_DEAD_RECORD_BYTES)}
    async with kafka.admin(run.settings) as admin:
        await admin.create_topics([NewTopic(topic, run.settings.partitions, 1, topic_configs=config)])
    run.watch.reopen = True


async def limit(run: Run, topic: str, num_bytes: str) -> None:
    """Limit the topic to records of that size."""
    await configure(run.settings, topic, "max.message.bytes", num_bytes)


@experiment(
    "23",
    "engine process killed, or out of memory, during a step",
    "its jobs run again, within their attempts; the worker keeps running",
    max_attempts=4,
)
async def engine_killed(run: Run) -> None:
    real = run.seed == 1
    engine = {"engine_factory": "tests.faults.engine:journaled_engine", "base_model": run.stack.base_model()}
    kills = run.random.randint(1, 2)
    async with run.dispatcher(), run.worker(**engine if real else {}) as worker:
        await run.traffic.send(run.count, latency_ms=(50, 300))
        for number in range(kills):
            await run.wait_called((number + 1) * run.count // 4)
            worker.engine().kill()
        if not real:
            await run.traffic.send_job(10, fate="crash")
        await run.wait_settled()
        run.expect(worker.alive, "the worker ended with its engine")
        restarts = await worker.metric("loraq_engine_restarts_total")
    jobs = await run.tables.jobs()
    run.expect(restarts >= kills, f"{restarts:.0f} engines were restarted, {kills} were killed")
    most = max(job.attempts for job in jobs)
    run.expect(most <= run.settings.max_attempts, f"a job was started {most} times")
    failed = [job for job in jobs if job.state != "succeeded"]
    run.expect(len(failed) <= (0 if real else 1), f"{len(failed)} jobs failed because of the engine, {failed[:1]}")
    run.notes.append(f"engine restarts: {restarts:.0f}" + (", real engine" if real else ""))
