"""The steps of `loraq up`."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.markup import escape

from services.errors import ConfigError, InputError
from services.localstack.config import ServerName, StackConfig
from services.localstack.display import Steps, show_servers, show_summary
from services.localstack.files import StackFiles
from services.localstack.processes import started_at
from services.localstack.running import read_running
from services.localstack.servers import ServerError
from services.localstack.stack import Outcome, Stack, check_free

WATCH_S = 0.2


@dataclass(frozen=True)
class UpOptions:
    """The options of `loraq up`."""

    directory: Path
    ports: dict[ServerName, int]
    base_model: Path | None
    cache_dir: Path
    lifetime_of: int | None = None
    foreground: bool = False
    as_json: bool = False


def run_up(options: UpOptions) -> None:
    """Start the stack; with `foreground`, wait until it ends or a signal arrives.

    If a step fails, a stack that this call started is stopped again; one that was already running continues.
    """
    console = Console(stderr=True)
    stack = Stack(options.directory)
    _check_options(stack, options)
    stack.files.create()
    with sigterm_interrupts():
        with stack.files.exclusively():
            _check_foreground(stack, options)
            try:
                with Steps(console) as steps:
                    config, outcome, base_model = bring_up(stack, options, steps)
            except BaseException:
                stack.abandon()
                raise
            if not options.foreground:
                stack.detach()
        show_summary(console, stack.files, config, outcome, base_model)
        if options.as_json:
            click.echo(json.dumps(config.environment(base_model)))
        if options.foreground:
            _stay(stack, console)


def _check_options(stack: Stack, options: UpOptions) -> None:
    """Check what can be checked before anything is created, including the directory."""
    if options.lifetime_of is not None and started_at(options.lifetime_of) is None:
        raise InputError(f"--lifetime-of {options.lifetime_of}: there is no such process")
    if options.base_model is not None and not (options.base_model / "config.json").is_file():
        raise InputError(f"{options.base_model} is not a Hugging Face model directory: it has no config.json")
    if not os.access(stack.files.directory, os.F_OK):
        check_free(options.ports)


def _check_foreground(stack: Stack, options: UpOptions) -> None:
    if options.foreground and stack.supervisor is not None:
        raise ConfigError(f"the stack in {options.directory} runs in the background: run `loraq down` first")


def bring_up(stack: Stack, options: UpOptions, steps: Steps) -> tuple[StackConfig, Outcome, Path]:
    """Start servers, prepare schema, base model, topics and bucket, and write stack.env.

    Call it inside `stack.files.exclusively()`. If it raises, call `stack.abandon()` to stop what it started.
    """
    _check_options(stack, options)
    config = stack.configure(options.ports)
    with ThreadPoolExecutor(2) as threads:
        # Convert the model and import the clients while the servers start, which is mostly waiting.
        converting = threads.submit(_base_model, options, steps)
        importing = threads.submit(import_module, "services.localstack.prepare")
        outcome = stack.bring_up(lambda running: show_servers(running, steps), options.lifetime_of)
        show_servers(read_running(stack.files), steps)
        importing.result()
        base_model = _make_usable(config, stack.files, converting, steps)
    return config, outcome, base_model


def _make_usable(config: StackConfig, files: StackFiles, converting: "Future[Path]", steps: Steps) -> Path:
    from services.localstack import prepare

    steps.now("schema", "migrating")
    steps.done("schema", f"version {prepare.ensure_schema(config, files)}")
    base_model = converting.result()
    steps.now("topics", "creating topics and bucket")
    settings = prepare.stack_settings(config, base_model)
    created = prepare.ensure_topics_and_bucket(settings)
    steps.done("topics", f"{len(created)} created" if created else "all exist")
    steps.done("bucket", settings.s3_bucket)
    prepare.write_env(config, files, base_model)
    return base_model


def _base_model(options: UpOptions, steps: Steps) -> Path:
    from services.localstack.base_model import ensure_base_model

    def show(doing: str, fraction: float) -> None:
        steps.now("base model", f"{doing} {fraction:.0%}")

    given = options.base_model
    model = given.absolute() if given is not None else ensure_base_model(options.cache_dir.absolute(), show)
    steps.done("base model", escape(str(model)))
    return model


def _stay(stack: Stack, console: Console) -> None:
    dead: set[str] = set()
    try:
        console.print("Press Ctrl-C to stop the stack.")
        while stack.supervisor is not None:
            for server in read_running(stack.files).dead:
                if server.name not in dead:
                    console.print(f"[red]{escape(server.problem or server.name)}[/]", highlight=False)
                    dead.add(server.name)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        console.print("Stopping the stack.")
        with stack.files.exclusively():
            stack.take_down()
        return
    if stack.files.running.exists():
        raise ServerError(f"the stack's supervisor was killed; see {stack.files.log('supervisor')}")
    console.print("The stack was stopped by `loraq down`.")


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that the command cleans up as on Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
