"""Killing pytest leaves neither a server nor a file behind."""

import subprocess
import sys
from pathlib import Path

from services.localstack.processes import started_at
from tests.waiting import eventually_sync

HANGING_TEST = """
import sys

def test_hangs(postgres_server, embedded_broker, server_room):
    print("FOUND", server_room.directory, postgres_server.pid, embedded_broker.pid, file=sys.__stdout__, flush=True)
    sys.__stdin__.read()
"""


def test_killed_pytest_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGING_TEST)
    options = ["-s", "-q", "-p", "tests.conftest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pytest_process:
        assert pytest_process.stdout is not None
        found = next(line for line in pytest_process.stdout if "FOUND" in line).split()
        directory, *pids = found[found.index("FOUND") + 1 :]
        assert Path(directory).is_dir()
        pytest_process.kill()
    eventually_sync(lambda: not any(started_at(int(pid)) for pid in pids), what="the servers' end")
    eventually_sync(lambda: not Path(directory).exists(), what="the removal of their files")
