"""Base class of the stack's servers: they start, become ready, stop, and die with their parent."""

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from services.errors import ConfigError, RetryableError
from services.localstack import child
from services.localstack.ports import is_free, wait_until_free

POLL_S = 0.02
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 15


class ServerError(RetryableError):
    """A server of the stack failed to start, or died."""


class Server(ABC):
    """One server process: a direct child of this process that ends when this process ends, however that happens.

    Its data is in `directory`, its output in `log`. Start it from a thread that lives as long as the server should.
    """

    name: ClassVar[str]
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    user_id: int = -1

    def __init__(self, directory: Path, log: Path, ports: Sequence[int]) -> None:
        self.directory = directory
        self.log = log
        self.ports = tuple(ports)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.ports[0]

    @abstractmethod
    def command(self) -> list[str]:
        """Absolute path of the program and its arguments."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves clients now."""

    def prepare(self) -> None:
        """Create what the program needs before it starts. Idempotent."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> Mapping[str, str]:
        """Environment variables in addition to those of this process."""
        return {}

    def leftovers(self) -> list[Path]:
        """Files outside `directory` that the server creates; removed after it stops and before it starts."""
        return []

    def discard_leftovers(self) -> None:
        """Remove the leftovers. Call it only when the server is not running."""
        for path in self.leftovers():
            path.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """Process id; None if the server is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the process, negative for a signal; None while it runs or before it starts."""
        return self._process.poll() if self._process is not None else None

    def start(self, timeout_s: float = 60.0) -> None:
        """Start and wait until ready. Raises ServerError with the end of the log, ConfigError for a port in use."""
        self.launch()
        self.wait_ready(timeout_s)

    def launch(self) -> None:
        """Start without waiting."""
        for port in self.ports:
            if not is_free(port):
                raise ConfigError(f"{self.name} cannot listen on 127.0.0.1:{port}: another process uses that port")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.discard_leftovers()
        self.prepare()
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._wrapped(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until ready. Raises ServerError if the server ends or the time runs out; then it is not running."""
        give_up_at = time.monotonic() + timeout_s
        while not self.check_ready():
            if time.monotonic() > give_up_at:
                self.kill()
                raise ServerError(f"{self.name} was not ready after {timeout_s:g} s; {self._log_tail()}")
            time.sleep(POLL_S)

    def check_ready(self) -> bool:
        """Whether it is ready. Raises ServerError with the end of the log if it has ended."""
        if self.pid is None:
            raise ServerError(f"{self.name} exited with status {self.exit_status} at start; {self._log_tail()}")
        return self.is_ready()

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Does nothing if it is not running."""
        if self._process is None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.discard_leftovers()

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash, and wait until it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            # Its children take a moment to end and occupy its ports until then.
            wait_until_free(self.ports, STOP_TIMEOUT_S)

    def run_tool(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run one of the server's programs as the server's user; returns its output. Raises ServerError."""
        finished = subprocess.run(
            self._wrapped(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            text=True,
            check=False,
        )
        if finished.returncode != 0:
            raise ServerError(f"{Path(command[0]).name} of {self.name} failed: {finished.stdout.strip()}")
        return finished.stdout

    def _wrapped(self, command: Sequence[str]) -> list[str]:
        wrapper = [sys.executable, "-I", "-S", child.__file__]
        return [*wrapper, str(os.getpid()), str(int(self.death_signal)), str(self.user_id), *command]

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n  ".join([f"the end of its log {self.log}:", *lines])
