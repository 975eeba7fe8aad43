"""The workers and dispatchers of a run, as processes. Waiting does not block the event loop that runs their proxies."""

import asyncio
import re
from pathlib import Path
from typing import Any

import psutil

from tests.faults.clock import Clock
from tests.faults.engine import JOURNAL
from tests.faults.entry import FaultSettings
from tests.faults.fork_server import ROOT, ForkServer
from tests.processes import Process, settings_environment, variables
from tests.waiting import eventually

READY_TIMEOUT_S = 150.0
END_TIMEOUT_S = 60.0
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Service:
    """One process of the product; one with its own clock needs a fork server that has preloaded the library."""

    def __init__(
        self,
        fork_server: ForkServer,
        name: str,
        kind: str,
        settings: FaultSettings,
        directory: Path,
        clock: Clock | None,
    ) -> None:
        self.name = name
        own = directory / name
        own.mkdir()
        given, env = settings_environment(settings), {"PYTHONPATH": str(ROOT), JOURNAL: str(directory / "journal")}
        clocked = {} if clock is None else clock.environment
        popen: Any = fork_server.fork(kind, variables(given, env | clocked, own), own)
        self.process = Process(popen, own)

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped by SIGSTOP)."""
        return self.process.exit_status is None

    async def wait_ready(self) -> None:
        """Wait until /readyz returns 200."""
        await asyncio.to_thread(self.process.wait_ready, READY_TIMEOUT_S)

    async def wait_exit(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait until it has exited on its own; returns its exit status."""
        await eventually(lambda: not self.alive, timeout_s, f"{self.name} to end")
        status = self.process.exit_status
        assert status is not None
        return status

    async def stop(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        return await asyncio.to_thread(self.process.stop, timeout_s)

    def engine(self) -> psutil.Process:
        """Its engine process."""
        [engine] = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "services.worker.engine.process" in child.cmdline()
        ]
        return engine

    def memory_bytes(self) -> int:
        """Resident memory of the process itself."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 if there is none."""
        _, text = await asyncio.to_thread(self.process.get, "/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(value)
            for found, described, value in SAMPLE.findall(text)
            if found == name and all(pair in described for pair in wanted)
        )

    async def unready_reasons(self) -> str:
        """The body of /readyz."""
        _, text = await asyncio.to_thread(self.process.get, "/readyz")
        return text
