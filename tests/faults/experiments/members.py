"""Rows 6, 7, 8 and 24: workers that are suspended, join and leave, run long jobs, or get SIGTERM."""

import asyncio
import signal

from tests.faults.experiment import experiment
from tests.faults.run import Run
from tests.faults.service import Service

JOB_MS = (2500, 3500)
MIN_STOPS = 3
CAPACITY_OVER_BATCH = 1.25  # a worker hands jobs to its engine before a batch ends


@experiment(
    "6",
    "SIGSTOP a worker past its session, another finishes, SIGCONT",
    "the zombie's write updates nothing; it rejoins; usage counted once",
)
async def suspended(run: Run) -> None:
    await run.traffic.send(run.count, latency_ms=(200, 400))
    async with run.dispatcher(), run.worker() as zombie:
        await run.wait_called(run.random.randint(20, 60))
        zombie.process.send_signal(signal.SIGSTOP)
        async with run.worker() as other:
            await run.wait_ended(run.count // 2)
            zombie.process.send_signal(signal.SIGCONT)
            await run.wait_settled()
            await run.wait_until(lambda: has_partitions(zombie, other), "the zombie to rejoin", 30.0)
            stale = await zombie.metric("loraq_stale_writes_total")
    run.expect(stale > 0, "the zombie's writes met no newer fence, so the fault did not occur")
    run.notes.append(f"{stale:.0f} stale attempts dropped")


async def has_partitions(*workers: Service) -> bool:
    """Whether each worker owns partitions."""
    owned = [await worker.metric("loraq_partitions_assigned") for worker in workers]
    return all(owned)


@experiment(
    "7",
    "a second worker starts and stops every few seconds, jobs longer than that",
    "all done; engine calls at most jobs + stops x jobs in flight at a stop; memory bounds kept across rebalances",
    drain_s=1.0,
    max_batch_size=64,
    max_backlog_jobs=120,
)
async def worker_churn(run: Run) -> None:
    stops, in_flight, most_leased = 0, 0, 0
    await run.traffic.send(run.count // 2, latency_ms=JOB_MS)
    async with run.dispatcher(), run.worker() as first:
        async with run.traffic.flowing(run.count - run.count // 2, per_s=12, latency_ms=JOB_MS) as flow:
            while stops < MIN_STOPS or not flow.done():
                async with run.worker() as second:
                    await run.wait_until(
                        lambda second=second: has_partitions(second), "the second worker to own partitions", 60.0
                    )
                    await run.holds_within(5.0, lambda second=second: has_jobs(second))
                    await asyncio.sleep(run.random.uniform(0.3, 2.0))
                    most_leased = max(
                        most_leased, await leased_jobs(run, first.name), await leased_jobs(run, second.name)
                    )
                    in_flight += round(await second.metric("loraq_running_jobs"))
                stops += 1
        await run.wait_settled()
    run.expect(in_flight > 0, "no job was in flight at any stop")
    bound = run.settings.max_backlog_jobs
    run.expect(
        most_leased <= bound,
        f"a worker leased {most_leased} jobs, more than its bound of {bound}: pauses were not re-applied",
    )
    allowed = run.count + in_flight + stops * round(run.settings.max_batch_size * CAPACITY_OVER_BATCH)
    found = len(run.calls())
    run.expect(found <= allowed, f"{found} engine calls, but {stops} stops explain at most {allowed}")
    run.notes.append(f"{stops} stops, {in_flight} jobs in flight at the stops, at most {most_leased} leased")


async def has_jobs(worker: Service) -> bool:
    """Whether its engine runs jobs."""
    return await worker.metric("loraq_running_jobs") > 0


async def leased_jobs(run: Run, worker: str) -> int:
    """Number of jobs that a worker leases; a job that it gave up keeps its name until another worker claims it."""
    unfinished = "state in ('queued', 'running') and lease_until is not null"
    return await run.tables.number(f"select count(*) from loraq.jobs where {unfinished} and worker = $1", worker)  # noqa: S608


@experiment(
    "8",
    "jobs longer than max.poll.interval; then an event loop that blocks indefinitely",
    "no rebalance: polling continues while paused; the watchdog detects the blocked loop and the process restarts",
    max_poll_interval_s=1.5,
    kafka_session_timeout_s=6.0,
    lease_s=6.0,
    max_batch_size=500,
    max_backlog_jobs=2000,
)
async def long_jobs(run: Run) -> None:
    await run.traffic.send(run.count, latency_ms=(3000, 5000))
    async with run.dispatcher():
        async with run.worker() as worker:
            await run.wait_settled()
            rebalances = await worker.metric("loraq_rebalances_total")
            calls = len(run.calls())
        await run.traffic.send(50)
        switches = {"blocked_after_s": 2.0, "crash_at": "after_db_commit", "crash_how": "block"}
        async with run.worker(**switches, wait=False) as blocked:
            status = await blocked.wait_exit(40.0)
            run.expect("loop_blocked" in blocked.process.log, "the watchdog did not log why it ended the process")
        async with run.worker():
            await run.wait_settled()
    run.expect(rebalances == 1, f"{rebalances:.0f} assignments: the worker lost its group membership during a long job")
    run.expect(calls == run.count, f"{calls} engine calls for {run.count} long jobs")
    run.expect(status == 1, f"the blocked worker ended with status {status}, not 1")


@experiment(
    "24",
    "SIGTERM under load",
    "drains within its grace period, commits, leaves the group; no finished job runs again",
    kafka_session_timeout_s=6.0,
    lease_s=6.0,
)
async def sigterm_under_load(run: Run) -> None:
    real = run.seed == 1
    engine = {"engine_factory": "tests.faults.engine:journaled_engine", "base_model": run.stack.base_model()}
    switches = engine if real else {}
    async with run.dispatcher(), run.traffic.flowing(run.count, per_s=150, latency_ms=(50, 300)) as flow:
        async with run.worker(**switches) as first:
            await run.wait_ended(run.random.randint(30, 150))
            started = asyncio.get_running_loop().time()
            status = await first.stop()
            took = asyncio.get_running_loop().time() - started
        running = [job for job in await run.tables.jobs() if job.state == "running"]
        before, ended = len(run.calls()), await run.tables.ended()
        async with run.worker(**switches) as second:
            joined = asyncio.get_running_loop().time()
            await run.wait_until(lambda: has_partitions(second), "the next worker to have partitions", 30.0)
            waited = asyncio.get_running_loop().time() - joined
            await flow
            await run.wait_settled()
    run.expect(status == 0, f"exit status {status} after SIGTERM")
    run.expect(
        took < run.settings.drain_s + 5,
        f"the worker took {took:.1f} s to stop, its grace period is {run.settings.drain_s} s",
    )
    run.expect(not running, f"{len(running)} jobs were left running")
    run.expect(waited < run.settings.kafka_session_timeout_s, "the first worker did not leave the group")
    run.expect_no_rerun(before, ended)
    run.expect(len(run.calls()) == len({call.key for call in run.calls()}), "a job reached an engine twice")
    run.notes.append(f"stopped in {took:.1f} s" + (", real engine" if real else ""))
