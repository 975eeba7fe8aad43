"""The output of `loraq up`: a line per finished step, a live line on a terminal, and a summary of what runs."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from services.localstack.config import StackConfig
from services.localstack.files import StackFiles
from services.localstack.running import Running
from services.localstack.stack import Outcome

NAME_WIDTH = 11
HEADLINES: dict[Outcome, str] = {
    "started": "The stack is up.",
    "repaired": "The stack is up again: servers that had died were restarted.",
    "unchanged": "The stack was already up.",
}
MEMORY_ONLY = "The broker keeps its records in memory: records that are not consumed when it stops are lost."
NEXT = "Next:  loraq registrar, worker and dispatcher, each in its own terminal; then loraq tenants add acme"
DEFAULT_DIRECTORY = Path(".loraq")


class Steps:
    """Steps by name, on stderr. May be used from several threads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("starting", console=console)
        self._running: dict[str, str] = {}
        self._finished: set[str] = set()
        self._began_at = time.monotonic()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def now(self, step: str, doing: str) -> None:
        """Show the current action of a step."""
        if step not in self._finished:
            self._running[step] = f"{step}: {doing}"
            self._show()

    def done(self, step: str, result: str) -> None:
        """Print the result of a step, once."""
        if step in self._finished:
            return
        self._finished.add(step)
        self._running.pop(step, None)
        elapsed_s = time.monotonic() - self._began_at
        line = f"  [green]✓[/] {step:<{NAME_WIDTH}} {result} [dim]({elapsed_s:.1f} s)[/]"
        self._console.print(line, highlight=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        self._status.update(" · ".join(tuple(self._running.values())) or "working")


def show_servers(running: Running, steps: Steps) -> None:
    """Show the servers' states from running.json as steps."""
    for server in running.servers:
        if server.state == "ready":
            steps.done(server.name, f"127.0.0.1:{server.port}, process {server.pid}")
        elif server.state == "starting":
            steps.now(server.name, "starting")


def show_summary(console: Console, files: StackFiles, config: StackConfig, outcome: Outcome, base_model: Path) -> None:
    """Print addresses, warnings and the next commands."""
    environment = config.environment(base_model)
    console.print(f"\n[bold]{HEADLINES[outcome]}[/]")
    console.print(_table(files, config, environment), soft_wrap=True)
    console.print(MEMORY_ONLY, highlight=False, soft_wrap=True)
    for name, value in environment.items():
        if os.environ.get(name, value) != value:
            console.print(f"[yellow]Your environment sets {name}, which overrides the stack's.[/]", highlight=False)
    if files.directory != DEFAULT_DIRECTORY.absolute():
        console.print(f"First: set -a; . {escape(str(files.env))}; set +a", highlight=False, soft_wrap=True)
    console.print(NEXT, highlight=False, soft_wrap=True)


def _table(files: StackFiles, config: StackConfig, environment: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = {
        "broker": f"{environment['LORAQ_KAFKA_BOOTSTRAP']}, Kafka protocol",
        "postgres": environment["LORAQ_DATABASE_URL"].replace(config.postgres_password, "…"),
        "s3": f"{environment['LORAQ_S3_ENDPOINT']}, bucket {environment['LORAQ_S3_BUCKET']}",
        "base model": environment["LORAQ_BASE_MODEL"],
        "settings": f"{files.env}, passwords and keys included",
        "logs": str(files.directory / "logs"),
    }
    for name, where in rows.items():
        table.add_row(f"  {name}", escape(where))
    return table
