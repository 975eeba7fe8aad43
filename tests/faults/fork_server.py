"""A fork server: it imports the product once and forks workers and dispatchers in milliseconds.

On busy cores the imports would take most of a run. Each child starts like entry.py. It is killed when the fork server
ends, and the fork server when the harness ends.

python -m tests.faults.fork_server        requests and replies are JSON, one per line
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from services.localstack import child as wrapper
from tests.faults.clock import PRELOAD

ROOT = Path(__file__).parents[2]
POLL_S = 0.02


class Child:
    """A forked process, with the methods of `subprocess.Popen` that the suite needs."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = self._server.ask(poll=self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it exits; raises subprocess.TimeoutExpired."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("child of the fork server", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Do nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client side. Create it in the main thread; any thread may use it. It can preload a library into children."""

    def __init__(self, preloaded: Path | None = None) -> None:
        command = [sys.executable, "-I", "-S", wrapper.__file__, str(os.getpid()), str(int(signal.SIGKILL)), "-1"]
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.faults.fork_server"],
            cwd=ROOT,
            env=os.environ | ({PRELOAD: str(preloaded)} if preloaded else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def fork(self, kind: str, env: dict[str, str], directory: Path) -> Child:
        """Fork a process whose output goes to `directory`/log."""
        return Child(self, self.ask(kind=kind, env=env, directory=str(directory)))

    def wait_ready(self) -> None:
        """Wait until the product is imported; any other request waits for that as well."""
        self.ask()

    def ask(self, **request: Any) -> Any:
        """Send one request and return the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Stop the server, and with it every child that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has already exited and printed the reason
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _serve() -> None:
    from tests.faults import entry

    statuses: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            answer = None
        elif "poll" in request:
            answer = _status(request["poll"], statuses)
        else:
            answer = os.fork()
            if answer == 0:
                _detach(request)
                entry.main(request["kind"])
                sys.exit(0)
        print(json.dumps(answer), flush=True)


def _status(pid: int, statuses: dict[int, int]) -> int | None:
    if pid not in statuses:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == 0:
            return None
        statuses[pid] = os.waitstatus_to_exitcode(status)
    return statuses[pid]


def _detach(request: dict[str, Any]) -> None:
    """Replace the session, pipes, directory and environment inherited from the fork server; die when it dies."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # replaces the interpreter's stream
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    _serve()
