"""Starts and stops the servers of a stack, from outside the supervisor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from services.errors import ConfigError
from services.localstack.config import ServerName, StackConfig, read_config, servers, write_config
from services.localstack.files import StackFiles
from services.localstack.ports import is_free
from services.localstack.running import Running, end_orphans, read_running, supervisor_pid
from services.localstack.servers import ServerError
from services.localstack.wheels import check_installed

POLL_S = 0.05
SETTLE_TIMEOUT_S = 90.0
END_TIMEOUT_S = 30.0

Report = Callable[[Running], None]
"""Called repeatedly with the state of the servers while they start."""
Outcome = Literal["started", "repaired", "unchanged"]


class Stack:
    """The servers of one directory. Call its methods inside `files.exclusively()`."""

    def __init__(self, directory: Path) -> None:
        self.files = StackFiles(directory.absolute())
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def supervisor(self) -> int | None:
        """Process id of the running supervisor; None if there is none."""
        return supervisor_pid(self.files)

    def configure(self, wanted_ports: Mapping[ServerName, int]) -> StackConfig:
        """Read or create the stack's configuration. Raises ConfigError if the stack runs on other ports than wanted."""
        check_installed()
        config = read_config(self.files)
        if config is not None and self.supervisor is not None:
            _check_ports(config, wanted_ports)
            return config
        end_orphans(self.files)
        config = (config or StackConfig.new()).with_ports(wanted_ports)
        check_free({server: port for server, port in config.ports.items() if server in config.chosen})
        config = config.with_free_ports()
        write_config(self.files, config)
        return config

    def bring_up(self, report: Report, lifetime_of: int | None = None) -> Outcome:
        """Start all servers and wait until they are ready. Raises ServerError for the first that cannot start.

        A stack that this call starts ends with this process, until `detach` is called, and with the process
        `lifetime_of`.
        """
        if self.supervisor is None:
            self._start_supervisor(lifetime_of)
            self._settle(report, repairs=0)
            return "started"
        running = read_running(self.files)
        if running.settled and not running.dead:
            return "unchanged"
        if running.settled:
            self._signal(signal.SIGHUP)
        self._settle(report, repairs=running.repairs + int(running.settled))
        return "repaired"

    def detach(self) -> None:
        """Let a stack that this process started outlive the process."""
        self._signal(signal.SIGUSR1)

    def abandon(self) -> None:
        """Stop the stack if this process started it; leave one that was already running."""
        if self._started is not None:
            self.take_down()

    def take_down(self) -> bool:
        """Stop the supervisor and its servers and wait until they have ended; returns whether anything was running."""
        was_running = self.supervisor is not None
        if was_running:
            self._signal(signal.SIGTERM)
            if not self._ends_within(END_TIMEOUT_S):
                self._signal(signal.SIGKILL)
                self._ends_within(END_TIMEOUT_S)
        ended = end_orphans(self.files)
        self._clean_up()
        self._reap()
        return was_running or bool(ended)

    def _start_supervisor(self, lifetime_of: int | None) -> None:
        self._clean_up()
        self._reap()
        lifetimes = [os.getpid()] + ([lifetime_of] if lifetime_of is not None else [])
        with self.files.log("supervisor").open("ab") as log:
            self._started = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "services.localstack.supervisor",
                    str(self.files.directory),
                    *map(str, lifetimes),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _reap(self) -> None:
        if self._started is not None:
            self._started.wait(END_TIMEOUT_S)

    def _settle(self, report: Report, repairs: int) -> None:
        give_up_at = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            running = read_running(self.files)
            report(running)
            if running.settled and running.repairs >= repairs:
                break
            self._check_supervisor()
            if time.monotonic() > give_up_at:
                raise ServerError(
                    f"the stack was not up after {SETTLE_TIMEOUT_S:g} s; see {self.files.log('supervisor')}"
                )
            time.sleep(POLL_S)
        for server in running.dead:
            raise ServerError(server.problem or f"{server.name} is not running; see {self.files.log(server.name)}")

    def _check_supervisor(self) -> None:
        if self._started is None and self.supervisor is None:
            raise ServerError(f"the supervisor has exited; see {self.files.log('supervisor')}")
        if self._started is not None and self._started.poll() is not None and not read_running(self.files).settled:
            raise ServerError(
                f"the supervisor exited with status {self._started.returncode}; see {self.files.log('supervisor')}"
            )

    def _signal(self, number: signal.Signals) -> None:
        pid = self.supervisor
        if pid is not None:
            os.kill(pid, number)

    def _ends_within(self, timeout_s: float) -> bool:
        give_up_at = time.monotonic() + timeout_s
        while self.supervisor is not None and time.monotonic() < give_up_at:
            if self._started is not None:
                self._started.poll()
            time.sleep(POLL_S)
        return self.supervisor is None

    def _clean_up(self) -> None:
        self.files.running.unlink(missing_ok=True)
        config = read_config(self.files)
        for server in servers(config, self.files) if config is not None else ():
            server.discard_leftovers()


def check_free(ports: Mapping[ServerName, int]) -> None:
    """Raise ConfigError for a port that another process uses."""
    for server, port in ports.items():
        if not is_free(port):
            raise ConfigError(
                f"port {port} of {server} is used by another process: stop it, or choose another with --{server}-port"
            )


def _check_ports(config: StackConfig, wanted: Mapping[ServerName, int]) -> None:
    for server, port in wanted.items():
        actual = config.ports[server]
        if actual != port:
            raise ConfigError(f"{server} runs on port {actual}, not {port}; run `loraq down` before you change it")
