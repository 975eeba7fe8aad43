"""Runs the demo from start to end: starts its servers and processes in order, and stops all of them."""

import asyncio
import json
import os
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from services.demo.plan import find_adapters
from services.demo.processes import Dispatcher, LoraqProcess, Registrar, Worker, running, watch
from services.demo.report import Report, as_dict
from services.demo.scenario import DemoResult, Scenario
from services.demo.view import View
from services.errors import InputError
from services.localstack.config import StackConfig
from services.localstack.display import Steps
from services.localstack.files import StackFiles
from services.localstack.prepare import stack_settings
from services.localstack.stack import Stack
from services.localstack.up import UpOptions, bring_up, sigterm_interrupts
from services.process.locks import try_lock

INTERRUPTED = 130
# Deviations from the defaults: webhooks go to a receiver on loopback, which the dispatcher refuses by default; shorter
# polling avoids waits of a second; the servers need cores too, and spinning OpenMP threads would occupy them.
PROCESS_VARIABLES = {
    "LORAQ_WEBHOOK_ALLOW_NETWORKS": '["127.0.0.0/8"]',
    "LORAQ_POLL_INTERVAL_S": "0.2",
    "LORAQ_ENGINE_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Options:
    """The options of `loraq demo`."""

    directory: Path
    num_jobs: int
    base_model: Path | None
    adapters_dir: Path
    cache_dir: Path
    keep: bool
    as_json: bool


def run_demo(options: Options) -> int:
    """Run the demo; returns the exit status. Everything that it starts has ended when it returns."""
    view = View(Console(stderr=options.as_json, highlight=False))
    stack = Stack(options.directory)
    stack.files.create()
    try:
        with sigterm_interrupts(), _exclusive(stack.files), _stopping(stack):
            return _run(options, stack, view)
    except KeyboardInterrupt:
        # The interrupt may have come after the cursor was hidden and before the code that shows it again.
        view.console.show_cursor()
        view.print("Interrupted; the demo stopped everything that it started.")
        return INTERRUPTED


def _run(options: Options, stack: Stack, view: View) -> int:
    view.heading(f"loraq: many LoRA adapters over one base model, as asynchronous jobs ({options.directory})")
    steps = Steps(view.console)
    config, base_model = _bring_up(options, stack, steps)
    adapters, remarks = find_adapters(options.adapters_dir, base_model)
    for remark in remarks:
        view.print(remark)
    environment = config.environment(base_model)
    processes = _processes(stack.files, environment)
    scenario = Scenario(stack_settings(config, base_model), adapters, options.num_jobs, view, steps)
    with running(processes):
        result = asyncio.run(_guarded(scenario.run(processes), watch(processes, stack.files)))
        report = Report(result, options.directory, environment["LORAQ_DATABASE_URL"], processes, options.keep)
        report.show(view)
        if options.as_json:
            print(json.dumps(as_dict(report)), flush=True)  # noqa: T201  # the machine-readable line
        if options.keep:
            with suppress(KeyboardInterrupt):
                asyncio.run(watch(processes, stack.files))
    return 1 if result.check.problems else 0


def _bring_up(options: Options, stack: Stack, steps: Steps) -> tuple[StackConfig, Path]:
    up = UpOptions(stack.files.directory, {}, options.base_model, options.cache_dir)
    with steps, stack.files.exclusively():
        config, _, base_model = bring_up(stack, up, steps)
    return config, base_model


async def _guarded(scenario: Coroutine[Any, Any, DemoResult], guard: Coroutine[Any, Any, None]) -> DemoResult:
    """The scenario's result; raises the guard's error if a process dies first."""
    running_scenario, watching = asyncio.create_task(scenario), asyncio.create_task(guard)
    try:
        await asyncio.wait({running_scenario, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await running_scenario
    finally:
        running_scenario.cancel()
        watching.cancel()
        await asyncio.gather(running_scenario, watching, return_exceptions=True)


def _processes(files: StackFiles, environment: Mapping[str, str]) -> list[LoraqProcess]:
    variables = {**environment, **PROCESS_VARIABLES}
    return [Registrar(files, variables), Worker(files, variables), Dispatcher(files, variables)]


@contextmanager
def _exclusive(files: StackFiles) -> Iterator[None]:
    """Refuse a second demo in the same directory: the two would stop each other's servers."""
    lock = try_lock(files.demo_lock)
    if lock is None:
        raise InputError(f"another demo is running in {files.directory}; choose another directory with --dir")
    with lock:
        yield


@contextmanager
def _stopping(stack: Stack) -> Iterator[None]:
    """At the end, stop the stack if the demo started it; one that was already running continues."""
    try:
        yield
    finally:
        # Another `loraq down --delete` may have removed the directory; then there is nothing left to stop.
        if stack.files.directory.is_dir():
            with stack.files.exclusively():
                stack.abandon()
