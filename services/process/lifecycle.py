"""The lifecycle of a process: signals, background tasks, health and metrics over HTTP, and the exit status.

    def worker() -> None:
        lifecycle.run("worker", settings, serve)

    async def serve(life: Lifecycle) -> None:
        async with open_pool(settings) as pool:
            life.background("consume", consume(pool, life.stop))
            await life.until_stopped(grace_s=settings.drain_s)     # ready from here; tasks end before the pool closes

The first SIGTERM or SIGINT sets `life.stop`; the second ends the process at once. The exit status is 0 if the process
was stopped and 1 if it failed.
"""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.errors import ConfigError, ServiceError
from services.process import telemetry
from services.process.environment import unknown_variables
from services.process.settings import Settings, hint_without_stack
from services.process.watchdog import LoopWatchdog

BLOCKED_AFTER_S = 60.0
_log = telemetry.get_logger()


class Health:
    """Which parts of the process are not ready, and why. A new process is `starting`."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {"process": "starting"}

    @property
    def reasons(self) -> dict[str, str]:
        """Reason by part; empty when ready."""
        return dict(self._reasons)

    @property
    def ready(self) -> str | None:
        """None when ready, otherwise all reasons in one line."""
        return "; ".join(f"{name}: {why}" for name, why in self._reasons.items()) or None

    def set(self, name: str, why_not: str | None) -> None:
        """Mark part `name` as ready (None) or set the reason why it is not."""
        if why_not is None:
            self._reasons.pop(name, None)
        else:
            self._reasons[name] = why_not


class TaskDiedError(ServiceError):
    """A background task ended before the process was asked to stop."""


class Lifecycle:
    """Passed to a process's `serve`: the stop event, the health and the background tasks."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.health = Health()
        self.failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._endless: set[asyncio.Task[None]] = set()

    def background(self, name: str, work: Coroutine[Any, Any, None], *, endless: bool = False) -> asyncio.Task[None]:
        """Run `work` until the process stops. If it raises or returns earlier, the process stops with status 1.

        `endless` work does not watch `stop`, so it is cancelled without a grace period.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        if endless:
            self._endless.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def started(self) -> None:
        """Mark start-up as finished: the process is ready unless another part is not. `until_stopped` calls it too."""
        self.health.set("process", None)

    async def until_stopped(self, grace_s: float = 0.0) -> None:
        """Wait for stop, give background tasks `grace_s` seconds to end on their own, then cancel the rest.

        Call it as the last line of `serve`, inside the resources that the tasks use.
        """
        self.started()
        await self.stop.wait()
        self.health.set("process", "stopping")
        await self.end_tasks(grace_s)

    async def end_tasks(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for the background tasks, then cancel the rest and await them."""
        await _cancel(self._endless)
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await _cancel(self._tasks)

    def fail(self, reason: BaseException) -> None:
        """Stop the process with exit status 1; only the first reason is kept."""
        self.failure = self.failure or reason
        self.stop.set()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._endless.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None and not self.stop.is_set():
            error = TaskDiedError(f"The background task {task.get_name()} ended before the process was stopped.")
        if error is not None:
            _log_error("Background task died", error, action="task_died", task=task.get_name())
            self.fail(error)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def run(process: str, settings: Settings, serve: Callable[[Lifecycle], Awaitable[None]]) -> None:
    """Run one process from start to end. Returns on a clean stop; otherwise logs why and raises SystemExit(1)."""
    telemetry.configure(settings, process)
    if (unknown := unknown_variables(os.environ)) is not None:
        _log.warning("Unknown settings in the environment", action="unknown_variables", reason=unknown)
    try:
        failure = asyncio.run(_run(process, settings, serve))
    except Exception as error:
        hint = hint_without_stack(error)
        _log_error("Process failed", error, action="process_failed", **({"hint": hint} if hint else {}))
        raise SystemExit(1) from error
    finally:
        telemetry.flush()
    if failure is not None:
        _log.error("Process failed", action="process_failed", reason=str(failure))
        raise SystemExit(1)
    _log.info("Process stopped", action="process_stopped")


async def _run(process: str, settings: Settings, serve: Callable[[Lifecycle], Awaitable[None]]) -> BaseException | None:
    life = Lifecycle()
    _handle_signals(life)
    async with LoopWatchdog(BLOCKED_AFTER_S, _exit_blocked).watching(), serve_health(life, process, settings):
        serving = asyncio.create_task(_serving(serve, life), name="serve")
        try:
            await _supervise(life, serving, settings.drain_s)
        finally:
            life.stop.set()
            await life.end_tasks(grace_s=0.0)
    return life.failure


async def _serving(serve: Callable[[Lifecycle], Awaitable[None]], life: Lifecycle) -> None:
    await serve(life)


async def _supervise(life: Lifecycle, serving: asyncio.Task[None], drain_s: float) -> None:
    """Wait for `serve`. After a failure in another task it gets `drain_s` seconds; after a signal it is not limited."""
    stopping = asyncio.create_task(life.stop.wait())
    both: set[asyncio.Task[Any]] = {serving, stopping}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if life.failure is not None:
        await asyncio.wait({serving}, timeout=drain_s)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    else:
        await serving


def _handle_signals(life: Lifecycle) -> None:
    """Uses `signal.signal`, not the loop's handlers: the second signal must end a process whose loop is blocked."""
    loop = asyncio.get_running_loop()
    received = 0

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(130)
        loop.call_soon_threadsafe(stop, signal.Signals(number).name)

    def stop(name: str) -> None:
        _log.info("Stopping on a signal", action="stopping", signal=name)
        life.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


@asynccontextmanager
async def serve_health(life: Lifecycle, process: str, settings: Settings) -> AsyncIterator[int]:
    """Serve /healthz, /readyz and /metrics; yields the port. Raises ConfigError if it cannot listen on the address."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", partial(_healthz, life, process)),
            web.get("/readyz", partial(_readyz, life, process)),
            web.get("/metrics", _metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        port = await _listen(runner, settings)
        _log.info("Serving health and metrics", action="http_listening", host=settings.http_host, port=port)
        yield port
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, settings: Settings) -> int:
    try:
        await web.TCPSite(runner, settings.http_host, settings.http_port).start()
    except OSError as error:
        address = f"{settings.http_host}:{settings.http_port}"
        raise ConfigError(f"LORAQ_HTTP_HOST, LORAQ_HTTP_PORT: cannot listen on {address}: {error.strerror}") from error
    port = int(runner.addresses[0][1])
    if settings.http_port_file is not None:
        _write_port(settings.http_port_file, port)
    return port


def _write_port(path: Path, port: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"LORAQ_HTTP_PORT_FILE: cannot write {path}: {error.strerror}") from error


async def _healthz(life: Lifecycle, process: str, _request: web.Request) -> web.Response:
    """A blocked loop cannot answer at all; the prober's timeout covers that case."""
    failed = life.failure is not None
    return web.json_response(
        {"process": process, "status": "failed" if failed else "ok"}, status=503 if failed else 200
    )


async def _readyz(life: Lifecycle, process: str, _request: web.Request) -> web.Response:
    reasons = life.health.reasons
    body = {"process": process, "ready": not reasons, "reasons": reasons}
    return web.json_response(body, status=503 if reasons else 200)


async def _metrics(_request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _exit_blocked() -> NoReturn:
    _log.critical("Event loop blocked; ending the process", action="loop_blocked", limit_s=BLOCKED_AFTER_S)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(1)


def _log_error(sentence: str, error: BaseException, *, action: str, **fields: str) -> None:
    """Logs one line for our own errors, and the traceback too for unexpected ones."""
    unexpected = not isinstance(error, ServiceError)
    reason = f"{type(error).__name__}: {error}" if unexpected else str(error)
    _log.error(sentence, action=action, reason=reason, exc_info=error if unexpected else None, **fields)
