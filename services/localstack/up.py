"""The steps of `loraq up`, in order."""

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
    """What `loraq up` was asked for."""

    directory: Path
    ports: dict[ServerName, int]
    base_model: Path | None
    cache_dir: Path
    lifetime_of: int | None = None
    foreground: bool = False
    as_json: bool = False


def run_up(options: UpOptions) -> None:
    """Bring the stack up; with `foreground`, stay until it ends or a signal comes.

    If a step fails, a stack that this call started is ended again; one that ran before goes on.
    """
    console = Console(stderr=True)
    stack = Stack(options.directory)
    _check_asked(stack, options)
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
                stack.let_go()
        show_summary(console, stack.files, config, outcome, base_model)
        if options.as_json:
            click.echo(json.dumps(config.environment(base_model)))
        if options.foreground:
            _stay(stack, console)


def _check_asked(stack: Stack, options: UpOptions) -> None:
    """What can be known to fail before anything is made, not even the directory."""
    if options.lifetime_of is not None and started_at(options.lifetime_of) is None:
        raise InputError(f"--lifetime-of {options.lifetime_of}: there is no such process")
    if options.base_model is not None and not (options.base_model / "config.json").is_file():
        raise InputError(f"{options.base_model} is not a Hugging Face model directory: it has no config.json")
    if not os.access(stack.files.directory, os.F_OK):
        check_free(options.ports)


def _check_foreground(stack: Stack, options: UpOptions) -> None:
    if options.foreground and stack.supervisor is not None:
        raise ConfigError(f"the stack in {options.directory} runs in the background: `loraq down` first")


def bring_up(stack: Stack, options: UpOptions, steps: Steps) -> tuple[StackConfig, Outcome, Path]:
    """Servers, schema, base model, topics, bucket and stack.env; call it inside `stack.files.exclusively()`.

    If it raises, what it started still runs: `stack.abandon()` ends that.
    """
    _check_asked(stack, options)
    config = stack.configure(options.ports)
    with ThreadPoolExecutor(2) as threads:
        # While the servers start, which is mostly waiting, the model is converted and their clients are imported.
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
    steps.now("topics", "making topics and bucket")
    settings = prepare.stack_settings(config, base_model)
    made = prepare.ensure_topics_and_bucket(settings)
    steps.done("topics", f"{len(made)} made" if made else "all there")
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
        console.print("Ctrl-C ends it.")
        while stack.supervisor is not None:
            for server in read_running(stack.files).dead:
                if server.name not in dead:
                    console.print(f"[red]{escape(server.problem or server.name)}[/]", highlight=False)
                    dead.add(server.name)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        console.print("Ending the stack.")
        with stack.files.exclusively():
            stack.take_down()
        return
    if stack.files.running.exists():
        raise ServerError(f"the stack's supervisor was killed; see {stack.files.log('supervisor')}")
    console.print("The stack was ended by `loraq down`.")


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that it cleans up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
