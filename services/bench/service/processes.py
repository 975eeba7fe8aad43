"""The processes of a run: children that end with this process, configured by environment variables."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import PermanentError, RetryableError
from services.localstack import child

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
TERMINATE_TIMEOUT_S = 10.0
POLL_S = 0.1
LOG_TAIL_CHARS = 2000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _command(arguments: Sequence[str]) -> list[str]:
    ends_with_parent = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(int(signal.SIGKILL)), "-1"]
    return [*ends_with_parent, sys.executable, "-m", *arguments]


async def run_module(arguments: Sequence[str], env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Run `python -m …` to its end and return the JSON object of its last line; raises PermanentError on failure.

    If this is cancelled or times out, the process is terminated, so that it removes what it created.
    """
    process = await asyncio.create_subprocess_exec(
        *_command(arguments), env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise PermanentError(f"{arguments[0]} did not end within {timeout_s:g} s") from error
    finally:
        await _terminate(process)
    if process.returncode != 0:
        tail = errors.decode("utf-8", "replace")[-LOG_TAIL_CHARS:].strip()
        raise PermanentError(f"{arguments[0]} ended with status {process.returncode}: {tail}")
    result: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return result


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """Terminate a process that still runs; kill it after TERMINATE_TIMEOUT_S."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(TERMINATE_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Cost:
    """Resources used by processes: CPU in seconds, memory in bytes."""

    cpu_s: float
    rss_bytes: int


class WorkerProcess:
    """`loraq worker --engine …` and the engine process that it starts."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: Path) -> None:
        self._process = process
        self._log = log
        self._port = port

    async def until_ready(self) -> None:
        """Wait until it is ready; raises RetryableError with the end of its log if it is not in time."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await asyncio.to_thread(self._is_ready):
                    self.check_alive()
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise RetryableError(f"the worker was not ready after {READY_TIMEOUT_S:g} s: {self._tail()}") from error

    def _is_ready(self) -> bool:
        if not self._port.exists():
            return False
        try:
            address = f"http://127.0.0.1:{int(self._port.read_text())}/readyz"
            with urllib.request.urlopen(address, timeout=2.0):  # loopback
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False
        except OSError:
            return False

    def check_alive(self) -> None:
        """Raise RetryableError with the end of its log if it has ended."""
        if self._process.returncode is not None:
            raise RetryableError(f"the worker ended with status {self._process.returncode}: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()

    def cost(self) -> Cost:
        """The resources of the worker's own process."""
        return cost_of(self._process.pid)

    def engine_cost(self) -> Cost:
        """The resources of its children: the engine process."""
        costs = [cost_of(pid) for pid in children_of(self._process.pid)]
        return Cost(sum(cost.cpu_s for cost in costs), sum(cost.rss_bytes for cost in costs))

    async def kill(self) -> None:
        """End it with SIGKILL; its engine process ends with it."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Let it drain; kill it after STOP_TIMEOUT_S."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def running_worker(engine: str, env: Mapping[str, str], directory: Path) -> AsyncIterator[WorkerProcess]:
    """A started worker, possibly not ready yet; it is stopped at the end."""
    log, port = directory / "worker.log", directory / "worker.port"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *_command(["services.cli.main", "worker", "--engine", engine]),
            env={**os.environ, **env, "LORAQ_HTTP_PORT_FILE": str(port)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    worker = WorkerProcess(process, log, port)
    try:
        yield worker
    finally:
        await worker.stop()


def cost_of(pid: int) -> Cost:
    """The resources of a process; zero if it is gone or the system is not Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Cost(0.0, 0)
    return Cost((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES)


def name_of(pid: int) -> str:
    """The name of a process; empty if it is gone or the system is not Linux."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """The ids of a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def machine_cpu_s() -> float:
    """CPU seconds that the machine was busy since its start; 0 if the system is not Linux."""
    try:
        user, nice, system, _idle, _wait, *rest = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    return sum(map(int, (user, nice, system, *rest[:2]))) / _TICKS_PER_S
