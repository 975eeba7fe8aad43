"""The order of a run: jobs by key, then a worker joins and one is killed, then the same jobs at random."""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO
from uuid import UUID

from services.bench.affinity.adapters import StoredAdapter, registered, stored_adapters
from services.bench.affinity.report import AffinityReport, Churn, Routed
from services.bench.affinity.traffic import Route, Traffic, send
from services.bench.affinity.warmth import Ran, recovery_s, share
from services.bench.service.bench_pool import BenchPool, open_bench_pool
from services.bench.service.check import terminal_rows, verdict
from services.bench.service.processes import WorkerProcess, running_worker
from services.errors import RetryableError
from services.postgres.pool import translated
from services.process.settings import MIB, Settings
from services.s3.store import open_store

PARTITIONS = 24
MIN_HOST_BYTES = 16 * MIB
POLL_S = 0.25
STALLED_S = 90.0
RAN = """
select jobs.job_id, jobs.accepted_at, results.load_ms = 0 as warm
from loraq.jobs left join loraq.results using (accepted_on, tenant, job_id)
where jobs.tenant = any($1::text[]) and jobs.state = 'succeeded'
"""
COUNT_ENDED = """
select count(*) from loraq.jobs
where tenant = any($1::text[]) and state in ('succeeded', 'failed', 'cancelled', 'expired')
"""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asks for. `room` is the number of adapters that one worker's memory holds."""

    jobs: int
    adapters: int
    room: int
    workers: int
    rate: float
    exponent: float
    churn_jobs: int
    wanted: float
    window: int
    seed: int

    def traffic(self, jobs: int, seed: int) -> Traffic:
        """Some jobs of this run."""
        return Traffic(jobs, self.rate, self.adapters, self.exponent, seed)


async def run_affinity(settings: Settings, options: RunOptions, progress: TextIO) -> AffinityReport:
    """One whole run; everything that it created is removed."""
    settings = settings.model_copy(update={"partitions": PARTITIONS})
    size_bytes = MIN_HOST_BYTES // options.room - 512  # the configuration and the header take the rest
    async with (
        open_store(settings) as store,
        open_bench_pool(settings) as bench,
        open_bench_pool(settings) as other,
        stored_adapters(store, bench.settings.pool, options.adapters, size_bytes) as adapters,
    ):
        progress.write(f"{len(adapters)} adapters of {size_bytes} bytes are stored\n")
        by_key, churn = await _measure(bench, options, adapters, "key", progress)
        at_random, _ = await _measure(other, options, adapters, "random", progress)
    return AffinityReport(
        jobs=options.jobs,
        adapters=options.adapters,
        room=options.room,
        workers=options.workers,
        rate_per_s=options.rate,
        exponent=options.exponent,
        by_key=by_key,
        at_random=at_random,
        churn=churn,
    )


async def _measure(
    bench: BenchPool, options: RunOptions, adapters: Sequence[StoredAdapter], route: Route, progress: TextIO
) -> tuple[Routed, Churn | None]:
    with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
        async with registered(bench, adapters), AsyncExitStack() as stack:
            workers = _Workers(bench, options, Path(scratch), stack)
            for _ in range(options.workers):
                await workers.start()
            await workers.until_ready()
            job_ids = await send(bench, options.traffic(options.jobs, options.seed), route)
            await _until_ended(bench, len(job_ids))
            ran = await _ran(bench)
            found = await verdict(bench, job_ids, await terminal_rows(bench))
            routed = Routed(len(ran), round(share(list(ran.values())), 4), found.lost, found.duplicates)
            progress.write(f"{route}: {routed.warm_share:.1%} of {routed.jobs} jobs found their adapter warm\n")
            if route == "key" and options.churn_jobs:
                return routed, await _churn(bench, options, workers, job_ids, progress)
    return routed, None


async def _churn(
    bench: BenchPool, options: RunOptions, workers: "_Workers", before: list[UUID], progress: TextIO
) -> Churn:
    """More jobs: a worker joins after a third of them, and the first one is killed after two thirds."""
    third_s = options.churn_jobs / options.rate / 3
    sending = asyncio.create_task(send(bench, options.traffic(options.churn_jobs, options.seed + 1), "key"))
    try:
        await asyncio.sleep(third_s)
        joined_at = await _now(bench)
        await workers.start()
        await asyncio.sleep(third_s)
        killed_at = await _now(bench)
        await workers.kill_first()
        job_ids = await sending
    finally:
        sending.cancel()
    await _until_ended(bench, len(before) + len(job_ids))
    ran = await _ran(bench)
    jobs = [ran[job_id] for job_id in job_ids if job_id in ran]
    found = await verdict(bench, [*before, *job_ids], await terminal_rows(bench))
    until_kill = [job for job in jobs if job.claimed_at < killed_at]
    churn = Churn(
        jobs=len(jobs),
        lost=found.lost,
        duplicates=found.duplicates,
        warm_share=round(share(jobs), 4),
        wanted_share=options.wanted,
        window_jobs=options.window,
        recovered_after_join_s=_rounded(recovery_s(until_kill, joined_at, options.wanted, options.window)),
        recovered_after_kill_s=_rounded(recovery_s(jobs, killed_at, options.wanted, options.window)),
    )
    progress.write(f"a worker joined and one was killed: {churn.warm_share:.1%} warm, {churn.lost} lost\n")
    return churn


class _Workers:
    """Workers with a disk cache each, as on machines of their own."""

    def __init__(self, bench: BenchPool, options: RunOptions, scratch: Path, stack: AsyncExitStack) -> None:
        self._place, self._scratch, self._stack = bench, scratch, stack
        self._running: list[WorkerProcess] = []
        self._variables = {
            "LORAQ_POOL": bench.settings.pool,
            "LORAQ_LANES": json.dumps(["standard"]),
            "LORAQ_HOST_CACHE_BYTES": str(MIN_HOST_BYTES),
            "LORAQ_LOG_LEVEL": "warning",
        }

    async def start(self) -> None:
        number = len(self._running)
        directory = self._scratch / f"worker-{number}"
        directory.mkdir()
        ours = {"LORAQ_WORKER_ID": f"bench-{number}", "LORAQ_CACHE_DIR": str(directory / "cache")}
        worker = running_worker("echo", self._variables | ours, directory)
        self._running.append(await self._stack.enter_async_context(worker))

    async def until_ready(self) -> None:
        for worker in self._running:
            await worker.until_ready()

    async def kill_first(self) -> None:
        await self._running[0].kill()


async def _until_ended(bench: BenchPool, wanted: int) -> None:
    """Wait until every job has ended; raises RetryableError if none has ended for long."""
    ended, moved_at = 0, time.monotonic()
    while ended < wanted:
        await asyncio.sleep(POLL_S)
        with translated("count the benchmark's jobs"):
            now_ended = int(await bench.database.fetchval(COUNT_ENDED, list(bench.tenants)))
        if now_ended > ended:
            ended, moved_at = now_ended, time.monotonic()
        if time.monotonic() - moved_at > STALLED_S:
            raise RetryableError(f"no job has ended for {STALLED_S:g} s; {ended} of {wanted} have")


async def _ran(bench: BenchPool) -> dict[UUID, Ran]:
    with translated("read the benchmark's jobs"):
        rows = await bench.database.fetch(RAN, list(bench.tenants), timeout=120.0)
    return {row["job_id"]: Ran(row["accepted_at"], bool(row["warm"])) for row in rows}


async def _now(bench: BenchPool) -> datetime:
    with translated("read the database's clock"):
        now: datetime = await bench.database.fetchval("select clock_timestamp()")
    return now


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
