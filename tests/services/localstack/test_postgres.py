"""PostgreSQL from its wheel: it needs the password, and its data survives a crash."""

import os
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from services.localstack.ports import free_ports
from services.localstack.servers import Postgres, ServerError


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[Postgres]:
    """A server below a directory that only its owner may enter, like a home directory."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = Postgres(closed / "data", closed / "log", free_ports(1)[0], "p@ss/word")
    yield server
    server.stop()


def test_data_survives_a_crash(postgres: Postgres) -> None:
    postgres.start()
    postgres.sql("create database kept")
    postgres.sql("create table t (x int)", "insert into t values (7)", database="kept")
    postgres.kill()
    postgres.start()
    assert postgres.sql("select x from t", database="kept") == "7\n"
    assert postgres.has_database("kept")
    assert not postgres.has_database("other")


def test_starts_with_a_pid_file_that_is_stale_or_empty(postgres: Postgres) -> None:
    postgres.start()
    postgres.kill()
    pid_file = postgres.directory / "postmaster.pid"
    _, *rest = pid_file.read_text().split("\n")
    for content in ("\n".join([str(os.getpid()), *rest]), ""):
        pid_file.write_text(content)
        postgres.start()
        assert postgres.pid is not None
        postgres.stop()


def test_an_interrupted_initialisation_is_repeated(postgres: Postgres) -> None:
    unfinished = postgres.directory.with_name("data.unfinished")
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    postgres.start()
    assert postgres.sql("select 1") == "1\n"
    assert not unfinished.exists()


async def test_the_password_is_needed(postgres_server: Postgres) -> None:
    url = postgres_server.url("postgres").replace(postgres_server.password, "guessed")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(url)


def test_a_bad_statement_is_quoted(postgres_server: Postgres) -> None:
    with pytest.raises(ServerError, match=r'psql of postgres failed: .*syntax error at or near "selekt"'):
        postgres_server.sql("selekt 1")


def test_the_error_for_a_damaged_cluster_names_the_file(postgres: Postgres) -> None:
    postgres.start()
    postgres.stop()
    (postgres.directory / "global" / "pg_control").unlink()
    with pytest.raises(ServerError, match=r"(?s)postgres exited with status \d at start.*pg_control"):
        postgres.start()
