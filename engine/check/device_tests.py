"""The tests that run on the device, with no more than the command's own packages, a process for each file."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.check.output import say

# As many processes as cores: torch in each of them is to take one, not all.
SETTINGS = {
    "KERNEL_GRID": "full",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONPATH": ".",
    "PYTHONUNBUFFERED": "1",
}
MOST_SECONDS = 240.0
TIMED_OUT = 124
GRID, ENGINE = Path("tests/engine/kernels/triton/grid"), Path("tests/engine/ondevice")


def pytest_command(tests: Sequence[Path], settings: Path) -> list[str]:
    """pytest without what the project's own settings and other tests ask for; `settings` is an empty file."""
    own = ["-c", str(settings), "--rootdir", ".", "--confcutdir", "tests/engine", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *own, *(str(path) for path in tests)]


def run_device_tests(folders: Sequence[Path] = (GRID, ENGINE), most_seconds: float = MOST_SECONDS) -> int:
    """The full grid of the kernels and the engine's promises; the worst exit code of pytest.

    Most of the time goes to compiling, which one process does one after the other: so they run beside each other. A
    file that takes longer than `most_seconds` is ended, as a kernel may hang, and has exit code 124.
    """
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as threads:
        settings = Path(directory) / "pytest.ini"
        settings.write_text("[pytest]\n")
        return max(threads.map(lambda path: _run(path, settings, most_seconds), files))


def _run(path: Path, settings: Path, most_seconds: float) -> int:
    environment = {**os.environ, **SETTINGS}
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    try:
        done = subprocess.run(
            pytest_command([path], settings),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=most_seconds,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code = expired.stdout or b"", TIMED_OUT
    end = "took longer and was ended after" if code == TIMED_OUT else f"exit code {code} after"
    say(f"{path}\n{output.decode(errors='replace')}{path}: {end} {time.monotonic() - started:.0f} s")
    return code
