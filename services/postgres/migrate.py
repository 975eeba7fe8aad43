"""`loraq migrate`: migrates the database schema to the version of this code. Migrations only go forward."""

import asyncio
from pathlib import Path

import asyncpg
import click
from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

import migrations
from services.errors import PermanentError
from services.parsing.addresses import hosts_of
from services.postgres.pool import translated
from services.process.settings import load_settings

MIGRATIONS = Path(migrations.__file__).parent
VERSION_SCHEMA = "loraq"
VERSION_TABLE = "schema_version"
MIGRATION_LOCK = 7_236_111_901  # arbitrary but unique; held by the process that migrates


def upgrade(database_url: str) -> tuple[str | None, str | None]:
    """Migrate to the newest version, in one transaction; returns the versions before and after.

    Safe to run repeatedly and from several processes at once. Must not be called from a running event loop (use a
    thread there). Raises RetryableError if the database does not answer, PermanentError if it refuses.
    """
    return asyncio.run(_upgrade(database_url))


async def _upgrade(database_url: str) -> tuple[str | None, str | None]:
    with translated(f"migrate the database at {hosts_of(database_url)}"):
        engine = create_async_engine(
            "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(database_url), poolclass=NullPool
        )
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(_upgrade_locked)
        finally:
            await engine.dispose()


def _upgrade_locked(connection: Connection) -> tuple[str | None, str | None]:
    with connection.begin():
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        connection.execute(text(f"create schema if not exists {VERSION_SCHEMA}"))
        before = _version(connection)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return before, _version(connection)


def _version(connection: Connection) -> str | None:
    options = {"version_table": VERSION_TABLE, "version_table_schema": VERSION_SCHEMA}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def run_script(name: str) -> None:
    """Run the whole script `migrations/sql/<name>` inside the migration's transaction."""
    script = (MIGRATIONS / "sql" / name).read_text()
    driver = op.get_bind().connection.driver_connection
    assert driver is not None
    await_only(driver.execute(script))


def refuse_downgrade(revision: str) -> None:
    """Raise PermanentError: no migration has a downgrade."""
    raise PermanentError(
        f"migration {revision} cannot be reverted, migrations only go forward; "
        "restore a backup, or write a new migration that undoes it"
    )


@click.command()
def migrate() -> None:
    """Migrate the database to the schema of this version."""
    before, after = upgrade(load_settings().database_url.get_secret_value())
    change = f"is already at {after}" if before == after else f"was migrated from {before or 'nothing'} to {after}"
    click.echo(f"The database {change}.", err=True)
