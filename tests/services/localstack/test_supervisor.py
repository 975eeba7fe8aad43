"""The supervisor owns the servers and restarts none on its own; no server outlives it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.localstack.config import StackConfig
from services.localstack.processes import started_at
from services.localstack.running import Running, read_running
from services.localstack.servers import ServerError
from services.localstack.stack import Stack
from tests.waiting import eventually_sync

pytestmark = pytest.mark.slow


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    stack.files.create()
    stack.configure({})
    yield stack
    stack.take_down()


def ignore(_running: Running) -> None:
    """Ignores progress reports."""


def pids(stack: Stack) -> dict[str, int]:
    return {server.name: server.pid for server in read_running(stack.files).servers if server.pid is not None}


def wait_for_the_end(servers: dict[str, int]) -> None:
    assert len(servers) == 3
    eventually_sync(lambda: not any(started_at(pid) for pid in servers.values()), what="the servers' end")


def test_servers_of_a_killed_supervisor_end(stack: Stack) -> None:
    assert stack.bring_up(ignore) == "started"
    stack.detach()
    servers, supervisor = pids(stack), stack.supervisor
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait_for_the_end(servers)
    config = stack.configure({})
    assert stack.bring_up(ignore) == "started"
    assert config.ports == stack.configure({}).ports


def test_the_stack_ends_with_the_given_process(stack: Stack) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stack.bring_up(ignore, lifetime_of=other.pid)
        stack.detach()
        servers = pids(stack)
        other.kill()
    wait_for_the_end(servers)
    eventually_sync(lambda: stack.supervisor is None, what="the supervisor's end")


def test_a_server_that_dies_stays_dead_until_up(stack: Stack) -> None:
    stack.bring_up(ignore)
    before = pids(stack)
    os.kill(before["broker"], signal.SIGKILL)
    (dead,) = eventually_sync(lambda: read_running(stack.files).dead, what="the supervisor to notice")
    assert (dead.name, dead.pid) == ("broker", None)
    assert dead.problem is not None
    assert "broker exited with status -9" in dead.problem
    assert "broker exited with status -9" in stack.files.log("supervisor").read_text()
    assert stack.bring_up(ignore) == "repaired"
    after = pids(stack)
    assert {name for name in before if before[name] != after[name]} == {"broker"}
    assert stack.bring_up(ignore) == "unchanged"


def test_a_server_that_cannot_start_is_named_and_the_others_are_stopped(stack: Stack, tmp_path: Path) -> None:
    port = stack.configure({}).postgres_port
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(ServerError, match=rf"postgres cannot listen on 127\.0\.0\.1:{port}"):
            stack.bring_up(ignore)
        eventually_sync(lambda: stack.supervisor is None, what="the supervisor's end")
    wait_for_the_end({**pids(stack), "postgres": 0})


def test_occupied_ports_that_the_user_did_not_set_are_replaced() -> None:
    config = StackConfig.new().with_ports({"s3": 9000})
    with socket.create_server(("127.0.0.1", config.broker_port)):
        moved = config.with_free_ports()
    assert moved.broker_port != config.broker_port
    assert moved.postgres_port == config.postgres_port
    assert moved.s3_ports == config.s3_ports
