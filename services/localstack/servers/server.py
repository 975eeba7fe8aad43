"""What all servers of the stack have in common: they start, become ready, stop, and die with their parent."""

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
    """A server of the stack did not start, or died."""


class Server(ABC):
    """One server process: a direct child of this process that ends when this process ends, however that happens.

    Its data lie in `directory`, its output in `log`. Start and stop it from one thread that lives as long as it should.
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
        """Make what the program needs before it starts. Repeating it changes nothing."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> Mapping[str, str]:
        """Variables beside those of this process."""
        return {}

    def leftovers(self) -> list[Path]:
        """Files outside `directory` that the server makes; removed when it has stopped, and before it starts."""
        return []

    def discard_leftovers(self) -> None:
        """Remove them; only when the server does not run."""
        for path in self.leftovers():
            path.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        """Status of the ended process, negative for a signal; None while it runs or before it started."""
        return self._process.poll() if self._process is not None else None

    def start(self, timeout_s: float = 60.0) -> None:
        """Start and wait until it serves. Raises ServerError with the end of its log, ConfigError for a taken port."""
        self.launch()
        self.wait_ready(timeout_s)

    def launch(self) -> None:
        """Start without waiting."""
        for port in self.ports:
            if not is_free(port):
                raise ConfigError(f"{self.name} cannot listen on 127.0.0.1:{port}: another process has that port")
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
        """Wait until it serves. Raises ServerError when it ends or the time is over; it does not run then."""
        give_up_at = time.monotonic() + timeout_s
        while not self.check_ready():
            if time.monotonic() > give_up_at:
                self.kill()
                raise ServerError(f"{self.name} was not ready after {timeout_s:g} s; {self._log_tail()}")
            time.sleep(POLL_S)

    def check_ready(self) -> bool:
        """Whether it serves now. Raises ServerError with the end of its log when it has ended instead."""
        if self.pid is None:
            raise ServerError(f"{self.name} ended with status {self.exit_status} at its start; {self._log_tail()}")
        return self.is_ready()

    def stop(self) -> None:
        """Stop it and wait until it is gone. Does nothing when it does not run."""
        if self._process is None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.discard_leftovers()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL) and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            # Children of its own take a moment to notice, and hold its ports until then.
            wait_until_free(self.ports, STOP_TIMEOUT_S)

    def run_tool(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a program of the server's to its end, as the server's user; returns its output. Raises ServerError."""
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
