"""The migrated schema has the promised public columns; migrations are linear, unchanged and forward-only."""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

import migrations
from services.errors import PermanentError
from services.localstack.servers import Postgres
from services.postgres.migrate import MIGRATIONS, refuse_downgrade, upgrade
from services.process.settings import Settings
from tests.processes import loraq

SQL = Path(migrations.__file__).parent / "sql"
HEAD = max(path.stem for path in SQL.glob("*.sql"))

PUBLIC = {
    "jobs": "tenant, job_id, pool, adapter, adapter_version, lane, state, error_code, error_message, attempts, "
    "accepted_on, accepted_at, started_at, finished_at, worker, replay_of, metadata, wait_reason, wait_since",
    "results": "tenant, job_id, accepted_on, output_text, output_url, output_token_ids, logprobs, finish_reason, "
    "prompt_tokens, cached_tokens, completion_tokens, queue_ms, load_ms, first_token_ms, total_ms",
    "adapters": "tenant, name, version, status, status_reason, base_model, base_fingerprint, rank, target_modules, "
    "uri, digest, size_bytes, score, pinned, created_at",
    "webhook_deliveries": "id, webhook_id, tenant, job_id, url, attempt, outcome, status_code, error, started_at, "
    "duration_ms, next_attempt_at",
    "usage_hourly": "tenant, adapter, adapter_version, hour, jobs, prompt_tokens, cached_tokens, completion_tokens, "
    "wasted_tokens",
    "tenant_limits": "tenant, weight, running, queued, tokens_per_s, burst, over_limit, changed_at",
}
COLUMNS = """
select c.relname as table, obj_description(c.oid) as table_comment, a.attname as column,
       col_description(c.oid, a.attnum) as comment, format_type(a.atttypid, null) as type
from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'loraq'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
      and a.attnum > 0 and not a.attisdropped
"""


async def columns(database_url: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(database_url)
    try:
        return await connection.fetch(COLUMNS)
    finally:
        await connection.close()


@pytest.mark.parametrize("table", PUBLIC)
async def test_public_tables_have_the_promised_columns_each_with_a_comment(table: str, database_url: str) -> None:
    found = {row["column"]: row for row in await columns(database_url) if row["table"] == table}
    uncommented = [name for name, row in found.items() if not row["comment"]]
    assert uncommented == []
    assert all(row["table_comment"] for row in found.values())
    public = {name for name, row in found.items() if not row["comment"].startswith("Private.")}
    assert public == set(PUBLIC[table].split(", "))


async def test_every_timestamp_has_a_time_zone(database_url: str) -> None:
    naive = [row for row in await columns(database_url) if row["type"] == "timestamp without time zone"]
    assert naive == []


def test_migrations_are_linear() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert len(scripts.get_heads()) == 1
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert sorted(revisions) == sorted(path.stem for path in SQL.glob("*.sql"))


def test_no_released_migration_has_changed() -> None:
    """A released migration never changes; for a new one run `sha256sum *.sql > SHA256SUMS` in its directory."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in SQL.glob("*.sql")}
    recorded = dict(reversed(line.split()) for line in (SQL / "SHA256SUMS").read_text().splitlines())
    assert found == recorded


def test_a_downgrade_is_refused() -> None:
    with pytest.raises(PermanentError, match="migrations only go forward"):
        refuse_downgrade("0001_initial")


@pytest.fixture
def empty_database(postgres_server: Postgres) -> str:
    name = "migrate_from_nothing"
    postgres_server.sql(f"drop database if exists {name} with (force)", f"create database {name}")
    return postgres_server.url(name)


def test_concurrent_migrations_run_once(empty_database: str) -> None:
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(upgrade, [empty_database] * 3))
    assert sorted(before or "" for before, _ in outcomes) == ["", HEAD, HEAD]
    assert {after for _, after in outcomes} == {HEAD}


def test_a_failing_migration_is_rolled_back(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path) -> str:
        return "create table loraq.half_done (); select 1 / 0;"

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", broken)
        with pytest.raises(PermanentError, match=r"could not migrate the database at .*: division by zero"):
            upgrade(empty_database)
    assert asyncio.run(schemas(empty_database)) == []


async def schemas(database_url: str) -> list[str]:
    connection = await asyncpg.connect(database_url)
    try:
        return [row[0] for row in await connection.fetch("select nspname from pg_namespace where nspname = 'loraq'")]
    finally:
        await connection.close()


def test_the_command_reports_the_version(settings: Settings) -> None:
    again = loraq("migrate", settings=settings)
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr == f"The database is already at {HEAD}.\n"
