"""The process that owns the three servers.

`python -m services.localstack.supervisor DIRECTORY PID…` starts them, and stops them when one of the given processes
ends: its starter, and optionally another one. After SIGUSR1, the end of the starter no longer stops them.

It does not restart a server on its own: a dead one is logged and shown in running.json. SIGHUP restarts dead servers;
SIGTERM and SIGINT stop all. If the supervisor is killed, the kernel ends the servers.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

from services.errors import ServiceError
from services.localstack.config import read_config, servers
from services.localstack.files import StackFiles
from services.localstack.processes import started_at
from services.localstack.running import Running, RunningServer, write_running
from services.localstack.servers import Server
from services.process.locks import try_lock

TICK_S = 0.1
START_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 1.0


class Supervisor:
    """Starts, watches and stops the servers, and keeps running.json up to date."""

    def __init__(self, files: StackFiles, stack: Sequence[Server], lifetimes: Sequence[int]) -> None:
        self._files = files
        self._stack = stack
        self._shown = {server.name: _shown(server, "starting") for server in stack}
        self._lifetimes = {pid: started_at(pid) for pid in lifetimes}
        self._starter = lifetimes[0]
        self._stop_reason: str | None = None
        self._repairs_wanted = 0
        self._repairs_done = 0

    def run(self) -> int:
        """Run until stopped, or until the first start fails; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        try:
            self._start(self._stack)
            self._publish(settled=True)
            if any(shown.state == "dead" for shown in self._shown.values()):
                return 1
            self._watch()
        finally:
            self._end()
        return 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._repairs_wanted += 1
        elif number == signal.SIGUSR1:
            self._lifetimes.pop(self._starter, None)
        else:
            self._stop_reason = signal.Signals(number).name

    def _watch(self) -> None:
        while not self._must_stop():
            self._record_deaths()
            if self._repairs_wanted > self._repairs_done:
                self._repair()
            time.sleep(TICK_S)

    def _must_stop(self) -> bool:
        for pid, began in list(self._lifetimes.items()):
            if began is None or started_at(pid) != began:
                self._stop_reason = f"the end of process {pid}"
        return self._stop_reason is not None

    def _start(self, stack: Sequence[Server]) -> None:
        """Start the servers in parallel and wait until each is ready or has failed, or the supervisor must stop."""
        waiting = {server.name: server for server in stack if self._launch(server)}
        self._publish()
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while waiting and not self._must_stop():
            for server in list(waiting.values()):
                if self._is_settled(server, give_up_at):
                    del waiting[server.name]
                    self._publish()
            time.sleep(TICK_S)

    def _launch(self, server: Server) -> bool:
        try:
            server.launch()
        except (ServiceError, OSError) as error:
            self._show(server, "dead", str(error))
            return False
        self._show(server, "starting")
        return True

    def _is_settled(self, server: Server, give_up_at: float) -> bool:
        try:
            if server.check_ready():
                self._show(server, "ready")
            elif time.monotonic() > give_up_at:
                server.kill()
                self._show(server, "dead", f"{server.name} was not ready after {START_TIMEOUT_S:g} s, see {server.log}")
        except ServiceError as error:
            self._show(server, "dead", str(error))
        return self._shown[server.name].state != "starting"

    def _record_deaths(self) -> None:
        for server in self._stack:
            if server.pid is None and self._shown[server.name].state == "ready":
                self._show(server, "dead", f"{server.name} exited with status {server.exit_status}, see {server.log}")
                self._publish(settled=True)

    def _repair(self) -> None:
        self._repairs_done = self._repairs_wanted
        self._start([server for server in self._stack if server.pid is None])
        self._publish(settled=True)

    def _end(self) -> None:
        log(f"Stopping on {self._stop_reason or 'a failed start'}")
        for server in self._stack:
            server.stop()
        if self._stop_reason is not None:
            self._files.running.unlink(missing_ok=True)

    def _show(self, server: Server, state: str, problem: str | None = None) -> None:
        self._shown[server.name] = _shown(server, state, problem)
        log(problem or f"{server.name} is {state} on port {server.port}")

    def _publish(self, *, settled: bool = False) -> None:
        shown = tuple(self._shown.values())
        write_running(self._files, Running(servers=shown, repairs=self._repairs_done, settled=settled))


def _shown(server: Server, state: str, problem: str | None = None) -> RunningServer:
    began = started_at(server.pid) if server.pid is not None else None
    return RunningServer.model_validate(
        {
            "name": server.name,
            "state": state,
            "port": server.port,
            "pid": server.pid,
            "started_at": began,
            "problem": problem,
        }
    )


def log(sentence: str) -> None:
    """Write a line to the supervisor's log, which is its stderr."""
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {sentence}", file=sys.stderr, flush=True)  # noqa: T201  # its log


def _lock(files: StackFiles) -> IO[str] | None:
    """Retries, because `is_locked` in another process holds the lock for an instant."""
    give_up_at = time.monotonic() + LOCK_TIMEOUT_S
    while (lock := try_lock(files.supervisor_lock)) is None and time.monotonic() < give_up_at:
        time.sleep(TICK_S)
    return lock


def main(directory: Path, lifetimes: Sequence[int]) -> int:
    """Run the supervisor of the stack in `directory`; at most one can run."""
    files = StackFiles(directory)
    lock = _lock(files)
    if lock is None:
        log("Another supervisor owns this stack")
        return 1
    with lock:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        config = read_config(files)
        assert config is not None, "`loraq up` writes the configuration first"
        return Supervisor(files, servers(config, files), lifetimes).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(pid) for pid in sys.argv[2:]]))
