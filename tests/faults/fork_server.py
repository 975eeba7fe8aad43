"""A process that has imported the product once and forks a fresh worker or dispatcher in milliseconds.

On busy cores the imports would be most of a run. Each child is a process of its own that begins as entry.py does; it
ends with the nursery, and the nursery with the harness.

python -m tests.faults.fork_server        requests and answers are JSON, one per line
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
    """A forked process, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery = nursery
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = self._nursery.ask(poll=self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises subprocess.TimeoutExpired."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if give_up_at is not None and time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("child of the nursery", timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The harness's end. Make it in the main thread; it may be asked from any. A library may be preloaded by it."""

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
        """A new process whose output goes to `directory`/log."""
        return Child(self, self.ask(kind=kind, env=env, directory=str(directory)))

    def wait_ready(self) -> None:
        """Until the product is imported; asking it anything waits as well."""
        self.ask()

    def ask(self, **request: Any) -> Any:
        """One request and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it, and with it every child that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended by itself, and said why
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
                _become(request)
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


def _become(request: dict[str, Any]) -> None:
    """Cut every tie with the nursery: session, pipes, directory, environment; and end when it ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the interpreter's own, over the new descriptors
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    _serve()
