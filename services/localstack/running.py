"""running.json: the supervisor's servers, read by `loraq up` and `loraq down`."""

import time
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from services.localstack.files import StackFiles, write_whole
from services.localstack.ports import wait_until_free
from services.localstack.processes import kill, started_at
from services.process.locks import is_locked

POLL_S = 0.02
ORPHAN_TIMEOUT_S = 5.0


class RunningServer(BaseModel):
    """One server. `started_at` distinguishes its process from a later one with the same id."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: Literal["starting", "ready", "dead"]
    port: int
    pid: int | None = None
    started_at: float | None = None
    problem: str | None = None


class Running(BaseModel):
    """All servers, and how often the supervisor has been asked to restart dead ones."""

    model_config = ConfigDict(frozen=True)

    servers: tuple[RunningServer, ...] = ()
    repairs: int = 0
    settled: bool = False

    @property
    def dead(self) -> tuple[RunningServer, ...]:
        """Servers that ended without being stopped."""
        return tuple(server for server in self.servers if server.state == "dead")


def read_running(files: StackFiles) -> Running:
    """What the supervisor wrote last; empty if the file is missing or invalid."""
    try:
        return Running.model_validate_json(files.running.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Running()


def write_running(files: StackFiles, running: Running) -> None:
    """Replace running.json."""
    write_whole(files.running, running.model_dump_json(indent=2) + "\n")


def supervisor_pid(files: StackFiles) -> int | None:
    """Process id of the running supervisor. The lock proves that it runs: another process may reuse the stored id."""
    return int(files.supervisor_lock.read_text()) if is_locked(files.supervisor_lock) else None


def end_orphans(files: StackFiles) -> list[str]:
    """Wait for servers whose supervisor has died; returns the names of those that had to be killed.

    On Linux the kernel has already signalled them; PostgreSQL may still be writing its last checkpoint.
    """
    orphans = [server for server in read_running(files).servers if _is_running(server)]
    killed = [server.name for server in orphans if not _ends_on_its_own(server)]
    wait_until_free([server.port for server in orphans], ORPHAN_TIMEOUT_S)
    return killed


def _is_running(server: RunningServer) -> bool:
    return server.pid is not None and started_at(server.pid) == server.started_at is not None


def _ends_on_its_own(server: RunningServer) -> bool:
    give_up_at = time.monotonic() + ORPHAN_TIMEOUT_S
    while server.pid is not None and _is_running(server):
        if time.monotonic() > give_up_at:
            kill(server.pid)
            return False
        time.sleep(POLL_S)
    return True
