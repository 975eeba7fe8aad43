"""The worker's end of the engine process: starts it, exchanges messages, and replaces it when it exits or hangs."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import EngineConfig, Request
from services.errors import ConfigError, PermanentError, RetryableError
from services.process import telemetry
from services.worker.engine.process import REAL_ENGINE
from services.worker.engine.protocol import (
    HEADER,
    Add,
    Cancel,
    Done,
    Expect,
    Fatal,
    FromEngine,
    Heartbeat,
    Load,
    Loaded,
    LoadFailed,
    Ready,
    Start,
    Status,
    ToEngine,
    Unload,
    decode,
    encode,
)

RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
LONGEST_AFTER_SERVING_S = 2.0
STEADY_AFTER_S = 60.0
FIRST_STARTS = 3
# OpenMP threads that spin for long starve other processes on their core. The bound is meant to cover the pause between
# two operators; its effect has not been measured.
OPENMP = {"GOMP_SPINCOUNT": "20000"}
_log = telemetry.get_logger()


class EngineLostError(RetryableError):
    """The engine process exited or stopped responding; its state is lost."""


class AdapterRefusedError(PermanentError):
    """The engine cannot serve the adapter; the message names the file, tensor or field."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine's configuration, its factory, and how long it may take to start or stay silent, in seconds."""

    config: EngineConfig
    factory: str = REAL_ENGINE
    start_timeout_s: float = 300.0
    silence_s: float = 120.0


def _ignore(_status: Status) -> None:
    pass


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """Called from the event loop: `up` once the engine is ready, `done` with a step's results, `lost` with a reason,
    `status` when the engine's counts or resident adapters changed."""

    up: Callable[[], None]
    done: Callable[[Done], None]
    lost: Callable[[str], None]
    status: Callable[[Status], None] = _ignore


def restart_delay_s(failures: int, *, has_served: bool) -> float:
    """Delay in seconds before the next start, after that many failures in a row.

    An engine that has served restarts soon: a job probably crashed it, and trials find which one (`suspects.py`).
    """
    delay_s = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
    return min(delay_s, LONGEST_AFTER_SERVING_S) if has_served else delay_s


class EngineBridge:
    """Runs one engine process at a time. Calls raise EngineLostError while none is ready."""

    def __init__(self, spec: EngineSpec, callbacks: EngineCallbacks) -> None:
        self._spec = spec
        self._callbacks = callbacks
        self._writer: asyncio.StreamWriter | None = None
        self._loads: dict[str, asyncio.Future[int]] = {}
        self._was_ready = False
        self._has_served = False
        self.ready = False
        self.pid: int | None = None

    async def run(self) -> None:
        """Keep an engine process running until cancelled.

        Raises ConfigError if the settings are wrong or the first `FIRST_STARTS` starts all failed.
        """
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            reason = await self._run_once()
            failures = 0 if loop.time() - began > STEADY_AFTER_S else failures
            delay_s = restart_delay_s(failures, has_served=self._has_served)
            failures += 1
            if not self._was_ready and failures >= FIRST_STARTS:
                raise ConfigError(f"the engine did not start in {failures} attempts; the last one failed: {reason}")
            telemetry.ENGINE_RESTARTS.inc()
            _log.error("Engine process lost", action="engine_lost", reason=reason, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> str:
        """Start one engine process and serve it until it exits; returns the reason."""
        self._has_served = False
        async with self._process() as (process, reader):
            try:
                await self._start(reader)
                await self._read(reader)
            except EngineLostError as error:
                reason = str(error)
            except (EOFError, OSError):
                reason = await _exit_reason(process)
        self._callbacks.lost(reason)
        return reason

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (sys.executable, "-m", "services.worker.engine.process", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(
                *arguments, pass_fds=(theirs.fileno(),), env=OPENMP | os.environ
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            yield process, reader
        finally:
            self._forget()
            self._writer.close()
            self._writer = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self, reader: asyncio.StreamReader) -> None:
        self._write(Start(self._spec.factory, self._spec.config))
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                message = await _next_message(reader)
        except TimeoutError as error:
            bound = f"LORAQ_ENGINE_START_TIMEOUT_S, {self._spec.start_timeout_s:g} s"
            raise EngineLostError(f"it did not start within {bound}") from error
        match message:
            case Ready(pid):
                self.ready, self._was_ready, self._has_served, self.pid = True, True, True, pid
                _log.info("Engine process ready", action="engine_ready", pid=pid)
                self._callbacks.up()
            case Fatal(reason, permanent):
                raise ConfigError(f"the engine cannot start: {reason}") if permanent else EngineLostError(reason)
            case _:
                raise AssertionError(f"an engine's first message is Ready or Fatal, not {message}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                async with asyncio.timeout(self._spec.silence_s):
                    message = await _next_message(reader)
            except TimeoutError as error:
                raise EngineLostError(f"it sent nothing for {self._spec.silence_s:g} s and was killed") from error
            self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Done():
                self._callbacks.done(message)
            case Loaded(digest, num_bytes):
                self._settle(digest, num_bytes)
            case LoadFailed(digest, reason):
                self._settle(digest, AdapterRefusedError(reason))
            case Fatal(reason, _):
                raise EngineLostError(reason)
            case Status():
                self._callbacks.status(message)
            case Heartbeat() | Ready():
                pass

    def _settle(self, digest: str, result: int | Exception) -> None:
        future = self._loads.pop(digest, None)
        if future is None or future.done():
            return
        if isinstance(result, int):
            future.set_result(result)
        else:
            future.set_exception(result)

    def _forget(self) -> None:
        self.ready, self.pid = False, None
        for digest in list(self._loads):
            self._settle(digest, EngineLostError("the engine process exited"))

    async def load(self, digest: str, path: Path) -> int:
        """Load an adapter while requests run; returns its bytes. Raises AdapterRefusedError or EngineLostError."""
        self._require_ready()
        assert digest not in self._loads, "an adapter is loaded once at a time"
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loads[digest] = future
        self._write(Load(digest, path))
        try:
            return await future
        finally:
            self._loads.pop(digest, None)

    def unload(self, digest: str) -> None:
        """Unload an adapter that no request uses."""
        if self.ready:
            self._write(Unload(digest))

    def add(self, requests: Iterable[Request]) -> None:
        """Run requests; each ends in a call of `done`, or all in a call of `lost`."""
        self._require_ready()
        self._write(Add(tuple(requests)))

    def expect(self, digests: Iterable[str]) -> None:
        """Name the adapters that will be needed, the one needed first first."""
        if self.ready:
            self._write(Expect(tuple(digests)))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Stop requests; `done` may still report those that finished first."""
        if self.ready:
            self._write(Cancel(tuple(request_ids)))

    def _require_ready(self) -> None:
        if not self.ready:
            raise EngineLostError("the engine process is not ready")

    def _write(self, message: ToEngine) -> None:
        """Write without waiting; the buffer is bounded by the requests in flight."""
        assert self._writer is not None
        self._writer.write(encode(message))


async def _next_message(reader: asyncio.StreamReader) -> FromEngine:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return decode(await reader.readexactly(length))  # type: ignore[return-value]  # an engine sends nothing else


async def _exit_reason(process: asyncio.subprocess.Process) -> str:
    status = await process.wait()
    if status >= 0:
        return f"it exited with status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-status).name}{hint}"
