"""The tests that run on the device, one process per file, with no packages beyond those that the command needs."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.check.output import print_line

# There are as many processes as cores, so torch uses one thread in each.
SETTINGS = {
    "KERNEL_GRID": "full",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONPATH": ".",
    "PYTHONUNBUFFERED": "1",
}
MAX_SECONDS = 240.0
TIMED_OUT = 124
GRID, ENGINE = Path("tests/engine/kernels/triton/grid"), Path("tests/engine/ondevice")


def pytest_command(tests: Sequence[Path], settings: Path) -> list[str]:
    """pytest without the project's settings and the other tests' plugins; `settings` is an empty file."""
    own = ["-c", str(settings), "--rootdir", ".", "--confcutdir", "tests/engine", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *own, *(str(path) for path in tests)]


def run_device_tests(folders: Sequence[Path] = (GRID, ENGINE), max_seconds: float = MAX_SECONDS) -> int:
    """Run the full grid of the kernels and the engine's device tests; returns the highest exit code of pytest.

    Most of the time goes to compiling, which is serial within a process, so the files run in parallel. A file that
    takes longer than `max_seconds` is killed, as a kernel may hang, and counts as exit code 124.
    """
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as threads:
        settings = Path(directory) / "pytest.ini"
        settings.write_text("[pytest]\n")
        return max(threads.map(lambda path: _run(path, settings, max_seconds), files))


def _run(path: Path, settings: Path, max_seconds: float) -> int:
    environment = {**os.environ, **SETTINGS}
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    try:
        done = subprocess.run(
            pytest_command([path], settings),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max_seconds,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code = expired.stdout or b"", TIMED_OUT
    end = "killed by timeout after" if code == TIMED_OUT else f"exit code {code} after"
    print_line(f"{path}\n{output.decode(errors='replace')}{path}: {end} {time.monotonic() - started:.0f} s")
    return code
