"""`loraq bench service` accounts for every job and leaves nothing behind."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.job import JobRequest
from services.bench import commands
from services.bench.service.bench_pool import open_bench_pool
from services.bench.service.check import Row, terminal_rows, verdict
from services.bench.service.latency import Snapshot, first_seen_ns, percentile, snapshot
from services.bench.service.plan import Plan
from services.bench.service.processes import run_module
from services.client.identifiers import uuid7
from services.errors import InputError
from services.kafka import clients as kafka
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings
from tests.processes import loraq, settings_environment, spawn
from tests.waiting import eventually

pytestmark = pytest.mark.slow

PLAN = Plan(jobs=30, paced=10, tenants=("a-1", "a-2"), started_ms=1_790_000_000_000)


def test_every_job_is_valid_and_has_a_unique_id() -> None:
    ids = list(PLAN.ids())
    assert len(set(ids)) == 40
    assert {each.version for each in ids} == {7}
    assert [JobRequest.model_validate_json(PLAN.value(index)).job_id for index in range(40)] == ids


def test_a_transaction_is_seen_in_the_first_snapshot_that_shows_it() -> None:
    snapshots = [
        snapshot(text, at) for at, text in enumerate(("100:100:", "100:103:100,102", "102:104:102", "104:104:"))
    ]
    assert snapshots[1] == Snapshot(1, 103, frozenset({100, 102}))
    assert [first_seen_ns(each, snapshots) for each in (99, 100, 101, 102, 103, 104)] == [0, 2, 1, 3, 2, None]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_the_nearest_rank(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(1 for value in ordered if value <= found) >= share * len(ordered)
    assert sum(1 for value in ordered if value < found) < share * len(ordered)


@pytest.fixture
def report(settings: Settings) -> dict[str, object]:
    found = loraq("bench", "service", "--jobs", "300", "--rate", "100", "--json", settings=settings)
    assert found.returncode == 0, found.stderr
    found_report: dict[str, object] = json.loads(found.stdout.splitlines()[-1])
    return found_report


async def test_a_run_loses_nothing_and_leaves_nothing(report: dict[str, object], settings: Settings) -> None:
    assert report["jobs"] == 300
    sent = 300 + int(str(report["paced_jobs"]))
    assert (report["rows"], report["results"], report["outbox_rows"], report["usage_jobs"]) == (sent,) * 4
    assert (report["lost"], report["duplicates"]) == (0, 0)
    assert report["jobs_per_s"] == pytest.approx(300 / float(str(report["wall_s"])), rel=0.01)
    assert 0 < float(str(report["p50_ms"])) <= float(str(report["p99_ms"])) <= float(str(report["max_ms"]))
    async with open_bench_pool(settings) as bench:
        assert await bench.database.fetchval("select count(*) from loraq.jobs") == 0
        assert await bench.database.fetchval("select count(*) from loraq.outbox") == 0
    async with kafka.admin(settings) as client:
        assert not [name for name in await client.list_topics() if name.startswith(settings.topic_prefix)]


async def test_a_run_ended_by_sigterm_leaves_nothing(settings: Settings, tmp_path: Path) -> None:
    command = ["bench", "service", "--jobs", "20000", "--rate", "0", "--json"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with spawn(command, settings, {"TMPDIR": str(scratch)}, ready_timeout_s=None) as process:
        await eventually(lambda: "jobs are in the topic" in process.log, what="the topic to be filled")
        await eventually(lambda: list(scratch.glob("loraq-bench-*/worker.port")), what="the worker to start")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 90.0) == 1
    assert len(children) >= 1
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert os.listdir(scratch) == []
    async with open_pool(settings) as pool:
        for table in ("tenants", "job_keys", "jobs", "results", "outbox", "parked_jobs", "usage_hourly"):
            left = await pool.fetchval(f"select count(*) from loraq.{table}")  # noqa: S608  # a name of our own
            assert left == 0, table
    async with kafka.admin(settings) as client:
        assert not [name for name in await client.list_topics() if name.startswith(settings.topic_prefix)]


async def test_a_peer_that_is_cancelled_drops_its_tables(settings: Settings) -> None:
    async with open_bench_pool(settings) as bench:
        variables = settings_environment(bench.settings)
        measuring = asyncio.create_task(run_module(["services.bench.service.peers", "bare", "1000"], variables, 60.0))
        statement = "select count(*) from pg_namespace where nspname like 'loraq_bench_%'"
        await eventually(lambda: bench.database.fetchval(statement), what="the peer's schema")
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        assert await bench.database.fetchval(statement) == 0


async def test_missing_and_duplicate_rows_are_counted(settings: Settings) -> None:
    async with open_bench_pool(settings) as bench:
        ids = [uuid7() for _ in range(3)]
        async with transaction(bench.database) as connection:
            for job_id in (ids[0], ids[1]):
                await connection.execute(
                    "insert into loraq.jobs (tenant, job_id, pool, lane, state, accepted_on, accepted_at, finished_at)"
                    " values ($1, $2, 'p', 'batch', 'succeeded', current_date, now(), now())",
                    bench.tenants[0],
                    job_id,
                )
            for kind in ("event", "webhook"):
                await connection.execute(
                    "insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body)"
                    " values ($1, $2, $3, $4, 'p', 'job.succeeded', '{}')",
                    uuid7(),
                    kind,
                    bench.tenants[0],
                    ids[0],
                )
        rows = await terminal_rows(bench)
        found = await verdict(bench, ids, rows)
        assert found.rows == 2
        assert found.lost == 2, "one has no row, and one has no outbox row"
        assert found.duplicates == 1, "one has two outbox rows"
        again = await verdict(bench, ids, [*rows, Row(ids[0], 1, rows[0].accepted_at, rows[0].finished_at)])
        assert again.duplicates == 2


def test_a_missing_peer_is_reported_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="FastStream, which is not installed: in the clone, pip install"):
        commands.bench.main(["service", "--peers"], standalone_mode=False)
