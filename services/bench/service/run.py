"""One run: fill the topic, let a worker process it, send at a steady rate, run the peers, then check the rows."""

import asyncio
import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from services.bench.service.bench_pool import BenchPool, open_bench_pool
from services.bench.service.check import Row, Verdict, database_cpu_s, progress, terminal_rows, verdict
from services.bench.service.latency import Watcher, first_seen_ns, percentile
from services.bench.service.plan import Plan
from services.bench.service.processes import Cost, WorkerProcess, machine_cpu_s, run_module, running_worker
from services.bench.service.report import ServiceReport
from services.errors import RetryableError
from services.process.settings import Settings

SAMPLE_S = 0.25
STALLED_S = 60.0
LOAD_TIMEOUT_S = 600.0
PEER_TIMEOUT_S = 300.0
PACED_S = 15.0
WARM_UP_S = 2.0
FASTSTREAM_JOBS = 10_000
MB = 1e6


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the command. `rate` None is half of the measured throughput; 0 skips the paced part."""

    jobs: int
    engine: str
    batch: int
    backlog: int
    rate: float | None
    peers: bool


@dataclass(slots=True)
class Usage:
    """The resources used while the worker processed the topic."""

    worker: Cost
    engine: Cost
    database_s: float
    machine_s: float
    rss: list[tuple[int, int]] = field(default_factory=list)
    """Finished jobs, and bytes of memory at that time."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of the paced jobs in milliseconds, sorted."""

    rate: float
    ordered: list[float]


async def run_service(settings: Settings, options: RunOptions, progress_to: TextIO) -> ServiceReport:
    """One run; everything that it created is removed afterwards, also if it is cancelled."""
    async with open_bench_pool(settings) as bench:
        return await _Run(bench, options, progress_to).measure()


class _Run:
    def __init__(self, bench: BenchPool, options: RunOptions, progress_to: TextIO) -> None:
        self._bench = bench
        self._options = options
        self._progress = progress_to
        self._paced = 0
        self._started_ms = time.time_ns() // 1_000_000

    @property
    def _plan(self) -> Plan:
        return Plan(self._options.jobs, self._paced, self._bench.tenants, self._started_ms)

    @property
    def _variables(self) -> Mapping[str, str]:
        return {
            "LORAQ_POOL": self._bench.settings.pool,
            "LORAQ_LANES": json.dumps(list(self._bench.settings.lanes)),
            "LORAQ_MAX_BATCH_SIZE": str(self._options.batch),
            "LORAQ_MAX_BACKLOG_JOBS": str(self._options.backlog),
            "LORAQ_LOG_LEVEL": "warning",
        }

    async def measure(self) -> ServiceReport:
        await self._load(0, self._options.jobs, 0.0)
        self._print(f"{self._options.jobs} jobs are in the topic")
        with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
            async with running_worker(self._options.engine, self._variables, Path(scratch)) as worker:
                usage = await self._drain(worker)
                rows = await terminal_rows(self._bench)
                wall_s = _seconds(rows)
                self._print(f"{len(rows)} jobs in {wall_s:.2f} s: {len(rows) / wall_s:.0f} jobs/s")
                latency = await self._latency(worker, len(rows) / wall_s)
        peers = await self._peers() if self._options.peers else {}
        found = await verdict(self._bench, self._plan.ids(), await terminal_rows(self._bench))
        return await self._report(wall_s, len(rows), usage, latency, peers, found)

    async def _load(self, first: int, count: int, rate: float) -> int:
        arguments = ["services.bench.service.load", json.dumps(asdict(self._plan)), str(first), str(count), str(rate)]
        return int((await run_module(arguments, self._variables, LOAD_TIMEOUT_S))["start_ns"])

    async def _drain(self, worker: WorkerProcess) -> Usage:
        """Wait until all jobs are done; raises RetryableError if nothing progresses for STALLED_S."""
        await worker.until_ready()
        usage = Usage(worker.cost(), worker.engine_cost(), await database_cpu_s(self._bench), machine_cpu_s())
        await self._until_done(worker, self._options.jobs, usage)
        before, engine_before = usage.worker, usage.engine
        usage.worker = Cost(worker.cost().cpu_s - before.cpu_s, worker.cost().rss_bytes)
        usage.engine = Cost(worker.engine_cost().cpu_s - engine_before.cpu_s, worker.engine_cost().rss_bytes)
        usage.machine_s = machine_cpu_s() - usage.machine_s
        usage.database_s = await database_cpu_s(self._bench) - usage.database_s
        return usage

    async def _until_done(self, worker: WorkerProcess, wanted: int, usage: Usage) -> None:
        done, progress_at = 0, time.monotonic()
        while done < wanted:
            await asyncio.sleep(SAMPLE_S)
            worker.check_alive()
            now_done = await progress(self._bench)
            if now_done > done:
                done, progress_at = now_done, time.monotonic()
            usage.rss.append((done, worker.cost().rss_bytes + worker.engine_cost().rss_bytes))
            if time.monotonic() - progress_at > STALLED_S:
                raise RetryableError(f"no progress for {STALLED_S:g} s: {done} of {wanted} jobs are done")

    async def _latency(self, worker: WorkerProcess, reached: float) -> Latency | None:
        rate = reached / 2 if self._options.rate is None else self._options.rate
        if rate == 0:
            return None
        self._paced = max(1, int(rate * PACED_S))
        async with self._watching() as watcher:
            start_ns = await self._load(self._options.jobs, self._paced, rate)
            ignored = Usage(worker.cost(), worker.engine_cost(), 0.0, 0.0)
            await self._until_done(worker, self._options.jobs + self._paced, ignored)
        ordered = await self._latencies(watcher, start_ns, rate)
        self._print(
            f"at {rate:.0f} jobs/s: median {percentile(ordered, 0.5):.1f} ms, p99 {percentile(ordered, 0.99):.1f} ms"
        )
        return Latency(rate, ordered)

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[Watcher]:
        watcher = Watcher(self._bench)
        task = asyncio.create_task(watcher.run(), name="watch")
        try:
            yield watcher
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _latencies(self, watcher: Watcher, start_ns: int, rate: float) -> list[float]:
        """The latencies of the paced jobs in milliseconds, without those of the first WARM_UP_S seconds."""
        first = self._options.jobs
        indexes = {self._plan.job_id(index): index - first for index in range(first, first + self._paced)}
        written = {row.job_id: row.written_by for row in await terminal_rows(self._bench) if row.job_id in indexes}
        seen = {each: first_seen_ns(each, watcher.snapshots) for each in set(written.values())}
        measured = []
        for job_id, index in indexes.items():
            at_ns = seen.get(written.get(job_id, -1))
            if at_ns is not None and index >= rate * WARM_UP_S:
                measured.append((at_ns - start_ns) / 1e6 - index / rate * 1e3)
        return sorted(measured)

    async def _peers(self) -> dict[str, float]:
        """Jobs per second of each peer, by name."""
        few, many = str(min(self._options.jobs, FASTSTREAM_JOBS)), str(self._options.jobs)
        rates = {}
        for name, arguments in {
            "faststream": ["faststream", few, "1"],
            "faststream_16": ["faststream", few, "16"],
            "bare": ["bare", many],
        }.items():
            found = await run_module(["services.bench.service.peers", *arguments], self._variables, PEER_TIMEOUT_S)
            rates[name] = round(found["jobs"] / found["seconds"], 1)
            self._print(f"{name}: {rates[name]:.0f} jobs/s")
        return rates

    async def _report(
        self,
        wall_s: float,
        num_rows: int,
        usage: Usage,
        latency: Latency | None,
        peers: dict[str, float],
        found: Verdict,
    ) -> ServiceReport:
        jobs_per_s = num_rows / wall_s
        best_peer = max(peers.get("faststream", 0.0), peers.get("faststream_16", 0.0))
        return ServiceReport(
            jobs_per_s=round(jobs_per_s, 1),
            wall_s=round(wall_s, 6),
            p50_ms=round(percentile(latency.ordered, 0.5), 1) if latency else None,
            p99_ms=round(percentile(latency.ordered, 0.99), 1) if latency else None,
            max_ms=round(latency.ordered[-1], 1) if latency else None,
            rate_per_s=round(latency.rate, 1) if latency else None,
            jobs=self._options.jobs,
            paced_jobs=self._paced,
            rows=found.rows,
            results=found.results,
            outbox_rows=found.outbox_rows,
            usage_jobs=found.usage_jobs,
            lost=found.lost,
            duplicates=found.duplicates,
            engine=self._options.engine,
            batch=self._options.batch,
            backlog=self._options.backlog,
            worker_cpu_us=round(usage.worker.cpu_s / num_rows * 1e6, 1),
            engine_cpu_us=round(usage.engine.cpu_s / num_rows * 1e6, 1),
            database_cpu_us=round(usage.database_s / num_rows * 1e6, 1),
            machine_cpu_us=round(usage.machine_s / num_rows * 1e6, 1),
            rss_mb_tenths=_by_tenths(usage.rss, self._options.jobs),
            rss_mb_peak=round(max(rss for _, rss in usage.rss) / MB, 1),
            faststream_jobs_per_s=peers.get("faststream"),
            faststream_16_jobs_per_s=peers.get("faststream_16"),
            ratio=round(jobs_per_s / best_peer, 2) if best_peer else None,
            bare_jobs_per_s=peers.get("bare"),
            synchronous_commit=str(await self._bench.database.fetchval("show synchronous_commit")),
            fsync=str(await self._bench.database.fetchval("show fsync")),
            load_average=round(os.getloadavg()[0], 2),
            machine=_machine(),
        )

    def _print(self, line: str) -> None:
        self._progress.write(f"{line}\n")
        self._progress.flush()


def _by_tenths(rss: list[tuple[int, int]], jobs: int) -> list[float]:
    """Memory after each tenth of the jobs."""
    marks = [jobs * tenth // 10 for tenth in range(1, 11)]
    return [round(next(size for done, size in rss if done >= mark) / MB, 1) for mark in marks]


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _seconds(rows: list[Row]) -> float:
    """From the first accepted job to the last terminal row, by the database's clock."""
    return (max(row.finished_at for row in rows) - min(row.accepted_at for row in rows)).total_seconds()
