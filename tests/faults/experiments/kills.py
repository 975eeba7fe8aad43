"""Rows 1, 2, 4 and 5: a process is killed at a named crash point, and another takes over."""

from tests.faults.experiment import experiment
from tests.faults.run import Run


@experiment("1", "kill after fetch, before the job row", "redelivered; one row")
async def killed_after_fetch(run: Run) -> None:
    await run.traffic.send(run.count)
    async with run.dispatcher():
        at = run.random.choice(("after_fetch", "before_job_row"))
        async with run.worker(crash_at=at, crash_hit=run.random.randint(1, 3), wait=False) as victim:
            await victim.wait_exit()
        before, ended = len(run.calls()), await run.tables.ended()
        async with run.worker():
            await run.wait_settled()
    run.expect_no_rerun(before, ended)


@experiment(
    "2",
    "kill in mid-generation",
    "new fence; one row (the first attempt's tokens are lost with its worker and cannot be counted as wasted)",
)
async def killed_in_generation(run: Run) -> None:
    real = run.seed == 1
    engine = {"engine_factory": "tests.faults.engine:journaled_engine", "base_model": run.stack.base_model()}
    switches = engine if real else {}
    await run.traffic.send(run.count, latency_ms=(50, 200))
    async with run.dispatcher():
        hit = run.random.randint(2, 6)
        async with run.worker(crash_at="in_generation", crash_hit=hit, wait=False, **switches) as victim:
            await victim.wait_exit()
        async with run.worker(**switches):
            await run.wait_settled()
    again = [job for job in await run.tables.jobs() if job.attempts > 1]
    run.expect(bool(again), "no job was in flight when the worker was killed")
    run.expect(all(job.fence > 1 for job in again), "a second attempt ran under the first one's fence")
    if real:
        run.notes.append("seed 1 with the real engine")


@experiment(
    "4",
    "kill after database commit, before offset commit",
    "redelivery finds the terminal row: no engine call, no second outbox row, offset moves",
)
async def killed_after_commit(run: Run) -> None:
    await run.traffic.send(run.count)
    async with run.dispatcher():
        hit = run.random.randint(1, 8)
        async with run.worker(crash_at="after_db_commit", crash_hit=hit, wait=False) as victim:
            await victim.wait_exit()
        before, ended = len(run.calls()), await run.tables.ended()
        async with run.worker():
            await run.wait_settled()
    run.expect(bool(ended), "no job had ended when the worker was killed")
    run.expect_no_rerun(before, ended)


@experiment(
    "5",
    "kill the dispatcher after a webhook's 2xx, before it is marked delivered",
    "the receiver gets one webhook-id twice, the second with a newer timestamp, both signatures valid",
)
async def killed_after_answer(run: Run) -> None:
    await run.traffic.send(run.count)
    async with run.worker():
        hit = run.random.randint(1, run.count // 2)
        async with run.dispatcher(crash_at="after_webhook_answer", crash_hit=hit, wait=False) as victim:
            await victim.wait_exit()
        async with run.dispatcher():
            await run.wait_settled()
    got: dict[object, list[int]] = {}
    for webhook in run.recorder.webhooks:
        got.setdefault(webhook.webhook_id, []).append(webhook.timestamp)
    twice = [times for times in got.values() if len(times) > 1]
    run.expect(bool(twice), "no webhook was sent twice")
    run.expect(all(times[-1] > times[0] for times in twice), "a repeated webhook did not carry a newer timestamp")
