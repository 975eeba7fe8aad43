"""Workers and dispatchers of a run as processes, handled without blocking the loop that serves their proxies."""

import asyncio
import re
from pathlib import Path
from typing import Any

import psutil

from tests.faults.clock import Clock
from tests.faults.engine import JOURNAL
from tests.faults.entry import FaultSettings
from tests.faults.fork_server import ROOT, Nursery
from tests.processes import Process, settings_environment, variables
from tests.waiting import eventually

READY_TIMEOUT_S = 150.0
END_TIMEOUT_S = 60.0
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Service:
    """One process of the product; one with a clock of its own needs a nursery that has preloaded the library."""

    def __init__(
        self, nursery: Nursery, name: str, kind: str, settings: FaultSettings, directory: Path, clock: Clock | None
    ) -> None:
        self.name = name
        own = directory / name
        own.mkdir()
        given, env = settings_environment(settings), {"PYTHONPATH": str(ROOT), JOURNAL: str(directory / "journal")}
        clocked = {} if clock is None else clock.environment
        popen: Any = nursery.fork(kind, variables(given, env | clocked, own), own)
        self.process = Process(popen, own)

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped by SIGSTOP)."""
        return self.process.exit_status is None

    async def ready(self) -> None:
        """Until /readyz answers 200."""
        await asyncio.to_thread(self.process.wait_ready, READY_TIMEOUT_S)

    async def died(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Until it has ended by itself; returns its exit status."""
        await eventually(lambda: not self.alive, timeout_s, f"{self.name} to end")
        status = self.process.exit_status
        assert status is not None
        return status

    async def stop(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """SIGTERM, and wait; returns the exit status."""
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
        """The sum of a metric's samples that carry these labels; 0 if there is none."""
        _, text = await asyncio.to_thread(self.process.get, "/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(value)
            for found, described, value in SAMPLE.findall(text)
            if found == name and all(pair in described for pair in wanted)
        )

    async def unready_reasons(self) -> str:
        """What /readyz says."""
        _, text = await asyncio.to_thread(self.process.get, "/readyz")
        return text
