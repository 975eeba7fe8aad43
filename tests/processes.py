"""Real processes of loraq, as an operator starts them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import SecretStr

from services.localstack import child
from services.process.settings import Settings

STOP_TIMEOUT_S = 30.0
POLL_S = 0.05


def settings_environment(settings: Settings) -> dict[str, str]:
    """The LORAQ_ variables that give another process the same settings; defaults are left out."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return {f"LORAQ_{name.upper()}": _as_text(value) for name, value in values.items() if value is not None}


def _as_text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return json.dumps(value) if isinstance(value, bool | list | tuple) else str(value)


class Process:
    """A running `loraq …` process."""

    def __init__(self, popen: "subprocess.Popen[bytes]", directory: Path) -> None:
        self._popen = popen
        self._log = directory / "log"
        self._port_file = directory / "port"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._popen.poll()

    @property
    def url(self) -> str:
        """Base address of /healthz, /readyz and /metrics."""
        return f"http://127.0.0.1:{self._port_file.read_text().strip()}"

    @property
    def log(self) -> str:
        """Its output to stdout and stderr so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET on the health port."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5.0) as answer:  # noqa: S310  # loopback http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as answer:
            with answer:
                return answer.code, answer.read().decode()

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has exited."""
        self._popen.kill()
        self._popen.wait()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until it exits; returns the exit status."""
        return self._popen.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and wait; returns the exit status. After the timeout it is killed and the test fails."""
        self._popen.terminate()
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the process did not exit within {timeout_s:g} s of SIGTERM; its log:\n{self.log}"
            ) from None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until /readyz returns 200; fails with the reasons and the log."""
        give_up_at = time.monotonic() + timeout_s
        reason = "/readyz is not served"
        while time.monotonic() < give_up_at:
            if self.exit_status is not None:
                raise AssertionError(
                    f"the process exited with status {self.exit_status} before it was ready; its log:\n{self.log}"
                )
            if self._port_file.exists():
                try:
                    status, reason = self.get("/readyz")
                except OSError as error:
                    status, reason = 0, str(error)
                if status == 200:
                    return
            time.sleep(POLL_S)
        raise AssertionError(f"the process was not ready after {timeout_s:g} s: {reason}; its log:\n{self.log}")


@contextmanager
def spawn(
    command: Sequence[str],
    settings: Settings,
    env: Mapping[str, str] | None = None,
    *,
    ready_timeout_s: float | None = 60.0,
) -> Iterator[Process]:
    """Run `loraq <command>` with these settings and wait until it is ready (`ready_timeout_s=None`: do not wait).

    At the end it gets SIGTERM if it still runs. If the test fails inside the block, its log is printed.
    It is killed when pytest or the calling thread dies.
    """
    with TemporaryDirectory(prefix="loraq-process-") as scratch:
        directory = Path(scratch)
        process = Process(start(command, settings_environment(settings), env or {}, directory), directory)
        try:
            if ready_timeout_s is not None:
                process.wait_ready(ready_timeout_s)
            yield process
        except BaseException:
            print(f"--- log of loraq {' '.join(command)}:\n{process.log}", file=sys.stderr)
            raise
        finally:
            if process.exit_status is None:
                process.stop()


def start(
    command: Sequence[str],
    settings: Mapping[str, str],
    env: Mapping[str, str],
    directory: Path,
    module: str = "services.cli.main",
) -> "subprocess.Popen[bytes]":
    """Start `python -m module <command>`; its log and its health port are written to the directory."""
    dies_with_this_process = [
        sys.executable,
        "-I",
        "-S",
        child.__file__,
        str(os.getpid()),
        str(int(signal.SIGKILL)),
        "-1",
    ]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            # A separate working directory, so that it does not read the developer's env file.
            [*dies_with_this_process, sys.executable, "-m", module, *command],
            cwd=directory,
            env=variables(settings, env, directory),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def variables(settings: Mapping[str, str], env: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of a process that writes its health port to the directory."""
    return {
        **os.environ,
        **settings,
        "LORAQ_HTTP_PORT_FILE": str(directory / "port"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **env,
    }


def loraq(
    *arguments: str, settings: Settings, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> "subprocess.CompletedProcess[str]":
    """Run `loraq <arguments>` to completion; captures stdout and stderr separately."""
    with TemporaryDirectory(prefix="loraq-process-") as scratch:
        return subprocess.run(
            [sys.executable, "-m", "services.cli.main", *arguments],
            cwd=scratch,
            env={**os.environ, **settings_environment(settings), "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
