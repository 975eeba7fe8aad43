"""The report of the service benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """One run. Times in milliseconds unless named otherwise, memory in MB of 10^6 bytes, CPU in microseconds per job.

    `jobs_per_s` is measured from the first accepted job to the last terminal row, by the database's clock, with all
    jobs in the topic beforehand. `p50_ms` and so on are measured at `rate_per_s`, from when a record was due until
    another connection sees the job's terminal row. `lost`: sent jobs that are not terminal or have no outbox row.
    `duplicates`: rows, results, outbox rows or usage beyond one per job. `rss_mb_tenths` is the memory of the worker
    with its engine process after each tenth of the jobs; `database_cpu_us` is that of the database server's processes,
    0 if it runs elsewhere; `machine_cpu_us` covers everything on the machine.
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
