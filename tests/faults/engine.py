"""Engines for the suite: an echo stub whose prompts set latency and failure, and the real engine. Both keep a journal.

The journal is a file to which every engine process appends one line per request. It outlives the processes and counts
the calls independently of what the product records.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from engine import EngineConfig, Output, PreparedRequest, Request
from services.worker.engine.echo import EchoEngine
from tests.faults.snapshot import Call, Key

JOURNAL = "FAULTS_JOURNAL"
LATENCY = re.compile(r"for (\d+) ms")
MAX_SLEEP_S = 0.01


def prompt_of(key: Key, latency_ms: int, fate: str = "") -> str:
    """The prompt of a job: its key, its latency, and whether it kills the engine (`die`, `crash`)."""
    return f"{key.tenant} {key.job_id} for {latency_ms} ms {fate}".strip()


class Journal:
    """Appends to the file named in the environment."""

    def __init__(self) -> None:
        self._file = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(self, request: Request) -> None:
        """Append a line in one write, so that lines of several processes do not mix and SIGKILL cannot lose one."""
        tenant, job_id = (request.prompt or "").split(" ")[:2]
        os.write(self._file, f"{time.time():.6f} {tenant} {job_id}\n".encode())


def calls(journal: Path) -> tuple[Call, ...]:
    """The calls in the journal."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return tuple(
        Call(Key(tenant, UUID(job_id)), float(at)) for at, tenant, job_id in (line.split(" ") for line in lines)
    )


class PacedEngine(EchoEngine):
    """An echo engine: each request takes as long as its prompt asks; at most `max_batch_size` run at once."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._journal = Journal()
        self._running: dict[str, tuple[float, Request]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._running)

    def add_prepared(self, request: Request) -> str:
        added = super().add_prepared(request)
        self._journal.record(request)
        return added

    def cancel(self, request_id: str) -> bool:
        return self._running.pop(request_id, None) is not None or super().cancel(request_id)

    def step(self) -> list[Output]:
        self._admit()
        now = time.monotonic()
        earliest = min((due for due, _ in self._running.values()), default=now)
        time.sleep(min(max(0.0, earliest - now), MAX_SLEEP_S))  # simulates the work of a step
        now = time.monotonic()
        finished = [request_id for request_id, (due, _) in self._running.items() if due <= now]
        return [self._echo(self._running.pop(request_id)[1]) for request_id in finished]

    def _admit(self) -> None:
        while self.waiting and len(self._running) < self.config.max_batch_size:
            request = self.waiting.popleft()
            prompt = request.prompt or ""
            if prompt.endswith("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if prompt.endswith("crash"):
                raise MemoryError("the engine is out of memory")
            found = LATENCY.search(prompt)
            assert request.request_id is not None
            latency_s = int(found.group(1)) / 1000 if found else 0.0
            self._running[request.request_id] = (time.monotonic() + latency_s, request)


def paced_engine(config: EngineConfig) -> PacedEngine:
    """The stub engine."""
    return PacedEngine(config)


def journaled_engine(config: EngineConfig) -> Any:
    """The real engine, with a journal."""
    from engine import Engine  # imports torch

    class JournaledEngine(Engine):
        _journal = Journal()

        def prepare(self, request: Request) -> PreparedRequest:
            prepared = super().prepare(request)
            self._journal.record(request)
            return prepared

    return JournaledEngine(config)
