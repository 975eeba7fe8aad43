"""Killing pytest leaves neither a server nor a file behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.localstack.processes import started_at
from tests.waiting import eventually_sync

HANGING_TEST = """
import os, threading
from pathlib import Path

def test_hangs(postgres_server, embedded_broker, server_files):
    found = Path(__file__).with_name("found")
    found.with_suffix(".new").write_text(f"{server_files.directory} {postgres_server.pid} {embedded_broker.pid}")
    os.replace(found.with_suffix(".new"), found)
    threading.Event().wait()
"""


@pytest.mark.parametrize("processes", ["0", "1"], ids=["alone", "one of several"])
def test_killed_pytest_leaves_nothing(tmp_path: Path, processes: str) -> None:
    """Also when the tests run in worker processes of pytest-xdist."""
    (tmp_path / "test_hangs.py").write_text(HANGING_TEST)
    options = ["-q", "-n", processes, "-p", "tests.conftest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    found = tmp_path / "found"
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as running:
        eventually_sync(lambda: found.exists() or running.poll() is not None, 120.0, "the servers to start")
        running.kill()
    assert found.exists(), log.read_text()
    directory, *pids = found.read_text().split()
    eventually_sync(lambda: not any(started_at(int(pid)) for pid in pids), what="the servers to exit")
    eventually_sync(lambda: not Path(directory).exists(), what="their files to be removed")
