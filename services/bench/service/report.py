"""What a run found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """One run. Times in milliseconds unless named otherwise, memory in MB of 10^6 bytes, CPU in microseconds per job.

    `jobs_per_s` is from the first job's taking to the last one's row, by the database's clock, with every job waiting
    in the topic. `p50_ms` and the like are from the moment at which a record was due to the moment at which another
    connection sees the job's row, at `rate_per_s`. `lost`: sent and not terminal, or without an outbox row.
    `duplicates`: rows, results, outbox rows or usage beyond one per job. `rss_mb_tenths` is the worker's memory, its
    engine process included, after each tenth of the jobs; `database_cpu_us` is of the server's processes, 0
    where it runs elsewhere; `machine_cpu_us` covers everything that ran on the machine.
    """

    jobs_per_s: float
    wall_s: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    rate_per_s: float | None
    jobs: int
    paced_jobs: int
    rows: int
    results: int
    outbox_rows: int
    usage_jobs: int
    lost: int
    duplicates: int
    engine: str
    batch: int
    backlog: int
    worker_cpu_us: float
    engine_cpu_us: float
    database_cpu_us: float
    machine_cpu_us: float
    rss_mb_tenths: list[float]
    rss_mb_peak: float
    faststream_jobs_per_s: float | None
    faststream_16_jobs_per_s: float | None
    ratio: float | None
    bare_jobs_per_s: float | None
    synchronous_commit: str
    fsync: str
    load_average: float
    machine: str
