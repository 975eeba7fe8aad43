"""The demo from beginning to end: what it starts, in which order, and that all of it ends."""

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
from services.demo.scenario import Story, Told
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
# What differs from the defaults, and why: webhooks go to a receiver on this machine, which the dispatcher refuses
# unless told; nobody should wait a second for a poll; the servers need cores too, and threads that spin while they
# wait for each other would take them away.
PROCESS_VARIABLES = {
    "LORAQ_WEBHOOK_ALLOW_NETWORKS": '["127.0.0.0/8"]',
    "LORAQ_POLL_INTERVAL_S": "0.2",
    "LORAQ_ENGINE_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Options:
    """What `loraq demo` was asked for."""

    directory: Path
    num_jobs: int
    base_model: Path | None
    adapters_dir: Path
    cache_dir: Path
    keep: bool
    as_json: bool


def run_demo(options: Options) -> int:
    """Run it; returns the exit status. Everything that this starts has ended when it returns."""
    view = View(Console(stderr=options.as_json, highlight=False))
    stack = Stack(options.directory)
    stack.files.create()
    try:
        with sigterm_interrupts(), _alone(stack.files), _ended(stack):
            return _run(options, stack, view)
    except KeyboardInterrupt:
        # It may have come between hiding the cursor and the guard that shows it again.
        view.console.show_cursor()
        view.say("Interrupted; everything that the demo started has ended.")
        return INTERRUPTED


def _run(options: Options, stack: Stack, view: View) -> int:
    view.heading(f"loraq: many LoRA adapters over one base model, as asynchronous jobs ({options.directory})")
    steps = Steps(view.console)
    config, base_model = _bring_up(options, stack, steps)
    adapters, remarks = find_adapters(options.adapters_dir, base_model)
    for remark in remarks:
        view.say(remark)
    environment = config.environment(base_model)
    processes = _processes(stack.files, environment)
    story = Story(stack_settings(config, base_model), adapters, options.num_jobs, view, steps)
    with running(processes):
        told = asyncio.run(_guarded(story.tell(processes), watch(processes, stack.files)))
        report = Report(told, options.directory, environment["LORAQ_DATABASE_URL"], processes, options.keep)
        report.show(view)
        if options.as_json:
            print(json.dumps(as_dict(report)), flush=True)  # noqa: T201  # the machine-readable line
        if options.keep:
            with suppress(KeyboardInterrupt):
                asyncio.run(watch(processes, stack.files))
    return 1 if told.verdict.problems else 0


def _bring_up(options: Options, stack: Stack, steps: Steps) -> tuple[StackConfig, Path]:
    up = UpOptions(stack.files.directory, {}, options.base_model, options.cache_dir)
    with steps, stack.files.exclusively():
        config, _, base_model = bring_up(stack, up, steps)
    return config, base_model


async def _guarded(telling: Coroutine[Any, Any, Told], guard: Coroutine[Any, Any, None]) -> Told:
    """The story's end, unless a process dies before; then that is what is raised."""
    story, watching = asyncio.create_task(telling), asyncio.create_task(guard)
    try:
        await asyncio.wait({story, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        return await story
    finally:
        story.cancel()
        watching.cancel()
        await asyncio.gather(story, watching, return_exceptions=True)


def _processes(files: StackFiles, environment: Mapping[str, str]) -> list[LoraqProcess]:
    variables = {**environment, **PROCESS_VARIABLES}
    return [Registrar(files, variables), Worker(files, variables), Dispatcher(files, variables)]


@contextmanager
def _alone(files: StackFiles) -> Iterator[None]:
    """Two demos in one directory would end each other's servers."""
    lock = try_lock(files.demo_lock)
    if lock is None:
        raise InputError(
            f"another demo is running in {files.directory}; give this one a directory of its own with --dir"
        )
    with lock:
        yield


@contextmanager
def _ended(stack: Stack) -> Iterator[None]:
    """End the stack at the end if the demo started it; one that ran before goes on."""
    try:
        yield
    finally:
        # `loraq down --delete` from elsewhere takes the directory away; then there is nothing left to end.
        if stack.files.directory.is_dir():
            with stack.files.exclusively():
                stack.abandon()
