"""`loraq demo` as a new user runs it: a complete run, and how it ends when something fails."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.builders import tiny_llama

pytestmark = pytest.mark.slow

PATIENCE_S = 240.0
POLL_S = 0.1


@contextmanager
def demo(directory: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """`loraq demo` in its own directory; killed if the test leaves it running."""
    with (directory / "stderr").open("w") as stderr:
        running = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "demo", *options],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def demo_processes(directory: Path) -> list[psutil.Process]:
    """Processes with the directory as working directory or in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(directory)) or str(directory) in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_nothing_is_left(directory: Path) -> None:
    left = demo_processes(directory)
    assert not left, left


def wait_for_process(directory: Path, name: str) -> psutil.Process:
    """The demo's `loraq <name>` process, once it serves."""
    port_file = directory / ".loraq" / "demo" / "data" / name / "port"
    give_up_at = time.monotonic() + PATIENCE_S
    while not port_file.exists():
        assert time.monotonic() < give_up_at, (directory / "stderr").read_text()
        time.sleep(POLL_S)
    (process,) = [p for p in demo_processes(directory) if p.cmdline()[-3:] == ["-m", "services.cli.main", name]]
    return process


@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path, base_model_dir: Path) -> None:
    with demo(tmp_path) as running:
        output, _ = running.communicate(timeout=2 * PATIENCE_S)
    assert running.returncode == 0, output + (tmp_path / "stderr").read_text()
    assert output.splitlines()[-1] == "demo: 30 jobs, 30 succeeded, 0 lost, 30 rows, 30 webhooks verified"
    assert "One prompt, 5 answers" in output
    assert "from loraq.jobs j join loraq.results r" in output
    assert "psql" in output
    assert "postgresql://loraq:" in output
    for name in ("base", "brief@1", "json@1", "pirate@1", "triage@1"):
        assert any(line.startswith(name) and line.split()[1] == "6" for line in output.splitlines()), name
    assert "\x1b[" not in output, "escape codes in a pipe"
    assert_nothing_is_left(tmp_path)


@pytest.mark.timeout(600)
def test_another_base_model_gets_only_the_adapters_that_fit_and_runs_until_interrupted(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "tiny")
    with demo(tmp_path, "--base-model", str(base), "--jobs", "4", "--json", "--keep") as running:
        assert running.stdout is not None
        summary = json.loads(running.stdout.readline())
        assert wait_for_process(tmp_path, "worker").is_running()
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == ""
        assert running.wait(PATIENCE_S) == 0
    assert (summary["succeeded"], summary["lost"], summary["rows"], summary["webhooks_verified"]) == (4, 0, 4, 4)
    assert [line["adapter"] for line in summary["adapters"]] == ["base"]
    stderr = (tmp_path / "stderr").read_text()
    assert "pirate does not fit the base model and is left out" in stderr
    assert stderr.splitlines()[-1] == "demo: 4 jobs, 4 succeeded, 0 lost, 4 rows, 4 webhooks verified"
    assert_nothing_is_left(tmp_path)


@pytest.mark.timeout(600)
def test_a_process_that_exits_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "tiny")
    with demo(tmp_path, "--base-model", str(base), "--jobs", "10000") as running:
        wait_for_process(tmp_path, "dispatcher").kill()
        running.communicate(timeout=PATIENCE_S)
    stderr = (tmp_path / "stderr").read_text()
    assert running.returncode == 1
    assert "loraq: dispatcher exited with status -9" in stderr
    assert str(Path(".loraq", "demo", "logs", "dispatcher.log")) in stderr
    assert_nothing_is_left(tmp_path)


@pytest.mark.timeout(600)
def test_an_interrupted_demo_ends_all_its_processes(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "tiny")
    with demo(tmp_path, "--base-model", str(base), "--jobs", "10000") as running:
        wait_for_process(tmp_path, "worker")
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert output.splitlines()[-1] == "Interrupted; the demo stopped everything that it started."
    assert_nothing_is_left(tmp_path)
