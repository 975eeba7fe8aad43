"""`loraq up` and `loraq down` on the command line."""

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


class Commands:
    """Runs commands in one directory, whose stack is in `.loraq`."""

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
    def foreground(self, *options: str) -> Iterator["subprocess.Popen[str]"]:
        """`loraq up --foreground`, once the stack is up."""
        command = self.command("up", "--foreground", *options)
        with subprocess.Popen(command, cwd=self.directory, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "Press Ctrl-C" in line:
                    break
            else:
                raise AssertionError("".join(lines))
            yield process

    def server_pids(self) -> dict[str, int]:
        return {server.name: server.pid for server in read_running(self.files).servers if server.pid is not None}

    def settings(self) -> Settings:
        return Settings(_env_file=self.files.env)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    directory = Commands(tmp_path)
    yield directory
    directory.run("down")


def assert_nothing_runs(commands: Commands, pids: dict[str, int]) -> None:
    assert set(pids) == {"broker", "postgres", "s3"}
    eventually_sync(lambda: not any(started_at(pid) for pid in pids.values()), what="the servers' end")
    assert processes_in(commands.directory) == []


def processes_in(directory: Path) -> list[str]:
    """Command lines of running processes that contain the directory."""
    found = psutil.process_iter(["cmdline", "status"])
    commands = [" ".join(it.info["cmdline"] or ()) for it in found if it.info["status"] != psutil.STATUS_ZOMBIE]
    return [command for command in commands if str(directory) in command]


def test_a_stack_from_its_creation_to_its_deletion(commands: Commands) -> None:
    output = commands.up()
    assert "The stack is up." in output
    assert "The broker keeps its records in memory" in output
    assert "loraq tenants add acme" in output
    assert commands.files.env.stat().st_mode & 0o777 == 0o600
    settings = commands.settings()
    assert settings.secret_key is not None
    assert settings.base_model == commands.base_model
    assert settings.database_url.get_secret_value() not in output
    first = commands.server_pids()

    output = commands.up("--json")
    assert "The stack was already up." in output
    assert commands.server_pids() == first
    asyncio.run(keep_something(settings))

    os.kill(first["postgres"], signal.SIGKILL)
    eventually_sync(lambda: read_running(commands.files).dead, what="the supervisor to notice")
    assert "servers that had died were restarted" in commands.up()
    repaired = commands.server_pids()
    assert {name for name in first if repaired[name] != first[name]} == {"postgres"}
    refused = commands.run("up", "--s3-port", "1")
    assert refused.returncode == 1
    assert re.search(r"loraq: s3 runs on port \d+, not 1; run `loraq down` before you change it", refused.stderr)

    assert "The stack is down." in commands.run("down").stderr
    assert_nothing_runs(commands, repaired)
    commands.up()
    assert commands.settings() == settings
    asyncio.run(check_kept(settings))

    assert "Deleted" in commands.run("down", "--delete").stderr
    assert not commands.files.directory.exists()
    assert "There is no stack" in commands.run("down").stderr


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


def test_ctrl_c_stops_a_stack_in_the_foreground(commands: Commands) -> None:
    with commands.foreground() as process:
        pids = commands.server_pids()
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    assert_nothing_runs(commands, pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_up_leaves_nothing_running(commands: Commands, number: int) -> None:
    with subprocess.Popen(commands.command("up"), cwd=commands.directory, stderr=subprocess.DEVNULL) as process:
        eventually_sync(commands.server_pids, what="the start of the servers")
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) != 0
    eventually_sync(lambda: processes_in(commands.directory) == [], what="the end of all")


def test_concurrent_ups_create_one_stack(commands: Commands) -> None:
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda _: commands.up(), range(2)))
    assert ["The stack is up." in each for each in outputs].count(True) == 1
    assert ["The stack was already up." in each for each in outputs].count(True) == 1
    assert len(commands.server_pids()) == 3


def test_a_chosen_port_in_use_is_named(commands: Commands, embedded_broker: Broker) -> None:
    refused = commands.run("up", "--broker-port", str(embedded_broker.port))
    assert refused.returncode == 1
    assert f"loraq: port {embedded_broker.port} of broker is used by another process" in refused.stderr
    assert "choose another with --broker-port" in refused.stderr
    assert processes_in(commands.directory) == []
    assert not commands.files.directory.exists()


def test_a_process_that_has_ended_is_refused_as_lifetime(commands: Commands) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    refused = commands.run("up", "--lifetime-of", str(gone.pid))
    assert refused.returncode == 1
    assert f"loraq: --lifetime-of {gone.pid}: there is no such process" in refused.stderr
    assert not commands.files.directory.exists()


def test_a_directory_without_a_model_is_named_before_anything_starts(commands: Commands) -> None:
    commands.base_model = commands.directory / "weights"
    commands.base_model.mkdir()
    refused = commands.run("up")
    assert refused.returncode == 1
    assert (
        f"loraq: {commands.base_model} is not a Hugging Face model directory: it has no config.json" in refused.stderr
    )
    assert "✓" not in refused.stderr


def test_a_directory_that_cannot_be_created_is_named(commands: Commands) -> None:
    (commands.directory / "file").write_text("")
    refused = commands.run("up", "--dir", "file/stack")
    assert refused.returncode == 1
    assert "cannot write to" in refused.stderr
    assert "--dir" in refused.stderr


def test_a_damaged_configuration_is_named(commands: Commands) -> None:
    commands.files.create()
    commands.files.config.write_text("{")
    refused = commands.run("up")
    assert refused.returncode == 1
    assert f"loraq: {commands.files.config} is damaged" in refused.stderr


def test_a_directory_that_cannot_be_read_is_named(commands: Commands) -> None:
    ended = commands.run("down", "--dir", "x" * 5000)
    assert ended.returncode == 1
    assert ended.stderr.startswith("loraq: cannot read '")
    assert ended.stderr.endswith("…: File name too long; choose another directory with --dir\n")


def test_down_deletes_nothing_but_a_stack(commands: Commands) -> None:
    (commands.directory / "photos").mkdir()
    refused = commands.run("down", "--dir", "photos", "--delete")
    assert refused.returncode == 1
    assert "contains no stack" in refused.stderr
    assert commands.run("down", "--dir", "photos").stderr == "There is no stack in photos.\n"
    assert list((commands.directory / "photos").iterdir()) == [], "the command left its lock behind"


def test_down_deletes_the_stacks_files_and_keeps_a_running_stack_below(commands: Commands) -> None:
    below = StackFiles(commands.files.directory / "demo")
    commands.up("--dir", ".loraq/demo")
    try:
        commands.up()
        (commands.files.directory / ".stack.env.1").write_text("")
        output = commands.run("down", "--delete").stderr
        assert "Deleted the stack in .loraq, but kept what it did not create: .loraq/demo." in output
        assert sorted(path.name for path in commands.files.directory.iterdir()) == [".gitignore", "demo"]
        running = read_running(below)
        assert running.settled
        assert not running.dead
        assert supervisor_pid(below) is not None
    finally:
        ended = commands.run("down", "--dir", ".loraq/demo", "--delete")
    assert "The stack is down." in ended.stderr
    assert "Deleted .loraq/demo." in ended.stderr
    assert processes_in(commands.directory) == []


def test_a_linked_data_directory_is_unlinked_and_not_emptied(commands: Commands) -> None:
    elsewhere = commands.directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    commands.files.create()
    (commands.files.directory / "data").rmdir()
    (commands.files.directory / "data").symlink_to(elsewhere)
    write_config(commands.files, StackConfig.new())
    assert "Deleted .loraq." in commands.run("down", "--delete").stderr
    assert (elsewhere / "kept").exists()
