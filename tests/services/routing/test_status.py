"""Workers' reports, on a real database."""

from collections.abc import Mapping

from services.postgres.pool import Pool, transaction
from services.routing.status import LIVE_S, Report, Tier, list_workers
from services.worker.supervision.reporter import REPLACE_EVERY_S, Reporter


def report(adapters: Mapping[str, Tier] | None = None, **fields: object) -> Report:
    defaults: dict[str, object] = {
        "uptime_s": 5.0,
        "engine_ready": True,
        "running": 3,
        "waiting": 4,
        "waiting_bytes": 1000,
        "tokens_per_s": 12.5,
        "saturated": False,
        "lanes": ("standard",),
        "partitions": 6,
        "adapters": adapters or {},
    }
    return Report(**defaults | fields)  # type: ignore[arg-type]  # the fields of a test


class Desk:
    """A reporter whose report the test sets."""

    def __init__(self, pool: Pool, worker: str, at: Report) -> None:
        self.report = at
        self.disk: frozenset[str] = frozenset()
        self.reporter = Reporter(pool, "default", worker, lambda _disk: self.report, lambda: self.disk)


async def adapters_of(pool: Pool, worker: str) -> dict[str, str]:
    rows = await pool.fetch("select digest, tier from loraq.worker_adapters where worker = $1", worker)
    return {row["digest"]: row["tier"] for row in rows}


async def test_a_worker_is_listed_until_it_withdraws(pool: Pool) -> None:
    desk = Desk(pool, "one", report({"a": "device", "b": "host", "c": "disk", "d": "disk"}))
    await desk.reporter.report(0.0)
    async with transaction(pool) as connection:
        [row] = await list_workers(connection, "default")
        assert await list_workers(connection, "other") == []
    assert row | {"age_s": 0, "started_at": 0} == {
        "pool": "default",
        "worker": "one",
        "age_s": 0,
        "state": "ready",
        "lanes": ["standard"],
        "partitions": 6,
        "running": 3,
        "waiting": 4,
        "tokens_per_s": 12.5,
        "device_adapters": 1,
        "host_adapters": 1,
        "disk_adapters": 2,
        "started_at": 0,
    }
    assert 0 <= row["age_s"] < LIVE_S
    await desk.reporter.withdraw()
    await desk.reporter.report(1.0)
    assert await pool.fetchval("select count(*) from loraq.worker_status") == 0
    assert await adapters_of(pool, "one") == {}


async def test_only_changes_of_adapters_are_written_and_what_was_lost_comes_back(pool: Pool) -> None:
    desk = Desk(pool, "one", report({"a": "host", "b": "host"}))
    await desk.reporter.report(0.0)
    desk.report = report({"b": "device", "c": "disk"})
    await desk.reporter.report(1.0)
    assert await adapters_of(pool, "one") == {"b": "device", "c": "disk"}
    await pool.execute("truncate loraq.worker_status, loraq.worker_adapters")  # as a crash of the server does
    await desk.reporter.report(2.0)
    assert await adapters_of(pool, "one") == {}
    await desk.reporter.report(REPLACE_EVERY_S + 1.0)
    assert await adapters_of(pool, "one") == {"b": "device", "c": "disk"}


async def test_a_worker_learns_the_load_of_the_others_that_can_run_jobs(pool: Pool) -> None:
    desk = Desk(pool, "one", report())
    await Desk(pool, "two", report(running=9, waiting=30)).reporter.report(0.0)
    await Desk(pool, "down", report(engine_ready=False)).reporter.report(0.0)
    await Desk(pool, "silent", report()).reporter.report(0.0)
    await pool.execute("update loraq.worker_status set seen_at = seen_at - interval '1 hour' where worker = 'silent'")
    await desk.reporter.report(0.0)
    assert desk.reporter.loads_of_others == [39]
    assert await pool.fetchval("select count(*) from loraq.worker_status where worker = 'silent'") == 0
