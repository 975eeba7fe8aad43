"""`loraq up` and `loraq down`, as a person types them."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest

from services.kafka import clients as kafka
from services.localstack.config import StackConfig, write_config
from services.localstack.files import StackFiles
from services.localstack.processes import started_at
from services.localstack.running import read_running, supervisor_pid
from services.localstack.servers import Broker
from services.process.settings import Settings
from services.s3.store import open_store
from tests.builders import tiny_llama
from tests.waiting import TIMEOUT_S, eventually_sync

pytestmark = pytest.mark.slow

UP_TIMEOUT_S = 120.0


class Typed:
    """Commands typed in one directory, in which the stack lies at `.loraq`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = StackFiles(directory / ".loraq")
        self.base_model = tiny_llama(directory / "model")

    def command(self, *arguments: str) -> list[str]:
        model = ["--base-model", str(self.base_model)] if arguments[0] == "up" else []
        return [sys.executable, "-m", "services.cli.main", *arguments, *model]

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )

    def up(self, *options: str) -> str:
        finished = self.run("up", *options)
        assert finished.returncode == 0, finished.stderr
        return finished.stderr

    @contextmanager
    def staying(self, *options: str) -> Iterator["subprocess.Popen[str]"]:
        """`loraq up --foreground`, up."""
        command = self.command("up", "--foreground", *options)
        with subprocess.Popen(command, cwd=self.directory, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            seen = []
            for line in process.stderr:
                seen.append(line)
                if "Ctrl-C ends it" in line:
                    break
            else:
                raise AssertionError("".join(seen))
            yield process

    def server_pids(self) -> dict[str, int]:
        return {server.name: server.pid for server in read_running(self.files).servers if server.pid is not None}

    def settings(self) -> Settings:
        return Settings(_env_file=self.files.env)


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Typed]:
    directory = Typed(tmp_path)
    yield directory
    directory.run("down")


def assert_nothing_runs(typed: Typed, pids: dict[str, int]) -> None:
    assert set(pids) == {"broker", "postgres", "s3"}
    eventually_sync(lambda: not any(started_at(pid) for pid in pids.values()), what="the servers' end")
    assert processes_in(typed.directory) == []


def processes_in(directory: Path) -> list[str]:
    """Command lines, of processes that live, that name the directory."""
    found = psutil.process_iter(["cmdline", "status"])
    commands = [" ".join(it.info["cmdline"] or ()) for it in found if it.info["status"] != psutil.STATUS_ZOMBIE]
    return [command for command in commands if str(directory) in command]


def test_a_stack_from_its_first_up_to_its_deletion(typed: Typed) -> None:
    said = typed.up()
    assert "The stack is up." in said
    assert "The broker keeps its records in memory" in said
    assert "loraq tenants add acme" in said
    assert typed.files.env.stat().st_mode & 0o777 == 0o600
    settings = typed.settings()
    assert settings.secret_key is not None
    assert settings.base_model == typed.base_model
    assert settings.database_url.get_secret_value() not in said
    first = typed.server_pids()

    said = typed.up("--json")
    assert "The stack was up already." in said
    assert typed.server_pids() == first
    asyncio.run(keep_something(settings))

    os.kill(first["postgres"], signal.SIGKILL)
    eventually_sync(lambda: read_running(typed.files).dead, what="the supervisor to notice")
    assert "what had ended was started" in typed.up()
    repaired = typed.server_pids()
    assert {name for name in first if repaired[name] != first[name]} == {"postgres"}
    refused = typed.run("up", "--s3-port", "1")
    assert refused.returncode == 1
    assert re.search(r"loraq: s3 runs on port \d+, not 1: change it after `loraq down`", refused.stderr)

    assert "The stack is down." in typed.run("down").stderr
    assert_nothing_runs(typed, repaired)
    typed.up()
    assert typed.settings() == settings
    asyncio.run(check_kept(settings))

    assert "Deleted" in typed.run("down", "--delete").stderr
    assert not typed.files.directory.exists()
    assert "There is no stack" in typed.run("down").stderr


async def keep_something(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.database_url.get_secret_value())
    await connection.execute("create table public.kept (x int); insert into public.kept values (7)")
    await connection.close()
    async with open_store(settings) as store:
        await store.put_bytes("kept", b"7", "text/plain")
    async with kafka.admin(settings) as admin:
        assert set(await admin.list_topics()) >= {topic.name for topic in kafka.pool_topics(settings)}


async def check_kept(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.database_url.get_secret_value())
    assert await connection.fetchval("select x from public.kept") == 7
    await connection.close()
    async with open_store(settings) as store:
        assert (await store.head("kept")) is not None


def test_ctrl_c_ends_a_stack_in_the_foreground(typed: Typed) -> None:
    with typed.staying() as process:
        pids = typed.server_pids()
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    assert_nothing_runs(typed, pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_up_leaves_nothing_running(typed: Typed, number: int) -> None:
    with subprocess.Popen(typed.command("up"), cwd=typed.directory, stderr=subprocess.DEVNULL) as process:
        eventually_sync(typed.server_pids, what="the start of the servers")
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) != 0
    eventually_sync(lambda: processes_in(typed.directory) == [], what="the end of all")


def test_two_ups_at_once_make_one_stack(typed: Typed) -> None:
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda _: typed.up(), range(2)))
    assert ["The stack is up." in output for output in said].count(True) == 1
    assert ["The stack was up already." in output for output in said].count(True) == 1
    assert len(typed.server_pids()) == 3


def test_a_chosen_port_that_is_taken_is_named(typed: Typed, embedded_broker: Broker) -> None:
    refused = typed.run("up", "--broker-port", str(embedded_broker.port))
    assert refused.returncode == 1
    assert f"loraq: port {embedded_broker.port} of broker belongs to another process" in refused.stderr
    assert "choose another with --broker-port" in refused.stderr
    assert processes_in(typed.directory) == []
    assert not typed.files.directory.exists()


def test_a_lifetime_that_is_over_is_named(typed: Typed) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    refused = typed.run("up", "--lifetime-of", str(gone.pid))
    assert refused.returncode == 1
    assert f"loraq: --lifetime-of {gone.pid}: there is no such process" in refused.stderr
    assert not typed.files.directory.exists()


def test_a_base_model_that_is_none_is_named_before_anything_starts(typed: Typed) -> None:
    typed.base_model = typed.directory / "weights"
    typed.base_model.mkdir()
    refused = typed.run("up")
    assert refused.returncode == 1
    assert f"loraq: {typed.base_model} is not a Hugging Face model directory: it has no config.json" in refused.stderr
    assert "✓" not in refused.stderr


def test_a_directory_that_cannot_be_is_named(typed: Typed) -> None:
    (typed.directory / "file").write_text("")
    refused = typed.run("up", "--dir", "file/stack")
    assert refused.returncode == 1
    assert "cannot write to" in refused.stderr
    assert "--dir" in refused.stderr


def test_a_damaged_configuration_is_named(typed: Typed) -> None:
    typed.files.create()
    typed.files.config.write_text("{")
    refused = typed.run("up")
    assert refused.returncode == 1
    assert f"loraq: {typed.files.config} is damaged" in refused.stderr


def test_a_directory_that_cannot_be_looked_at_is_named(typed: Typed) -> None:
    ended = typed.run("down", "--dir", "x" * 5000)
    assert ended.returncode == 1
    assert ended.stderr.startswith("loraq: '")
    assert ended.stderr.endswith("… cannot be looked at: File name too long; name another with --dir\n")


def test_down_deletes_nothing_but_a_stack(typed: Typed) -> None:
    (typed.directory / "photos").mkdir()
    refused = typed.run("down", "--dir", "photos", "--delete")
    assert refused.returncode == 1
    assert "holds no stack" in refused.stderr
    assert typed.run("down", "--dir", "photos").stderr == "There is no stack in photos.\n"
    assert list((typed.directory / "photos").iterdir()) == [], "it left its lock behind"


def test_down_deletes_what_the_stack_made_and_leaves_a_living_stack_below(typed: Typed) -> None:
    below = StackFiles(typed.files.directory / "demo")
    typed.up("--dir", ".loraq/demo")
    try:
        typed.up()
        (typed.files.directory / ".stack.env.1").write_text("")
        said = typed.run("down", "--delete").stderr
        assert "Deleted the stack in .loraq, but not what it did not make: .loraq/demo." in said
        assert sorted(path.name for path in typed.files.directory.iterdir()) == [".gitignore", "demo"]
        running = read_running(below)
        assert running.settled
        assert not running.dead
        assert supervisor_pid(below) is not None
    finally:
        ended = typed.run("down", "--dir", ".loraq/demo", "--delete")
    assert "The stack is down." in ended.stderr
    assert "Deleted .loraq/demo." in ended.stderr
    assert processes_in(typed.directory) == []


def test_a_linked_data_directory_is_let_go_and_not_emptied(typed: Typed) -> None:
    elsewhere = typed.directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    typed.files.create()
    (typed.files.directory / "data").rmdir()
    (typed.files.directory / "data").symlink_to(elsewhere)
    write_config(typed.files, StackConfig.new())
    assert "Deleted .loraq." in typed.run("down", "--delete").stderr
    assert (elsewhere / "kept").exists()
