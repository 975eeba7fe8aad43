"""The demo's output: live progress bars and tables on a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from services.demo.traffic import JobProgress

PLAIN_WIDTH = 100
NAME_WIDTH = 11
BASE = "base"


class View:
    """Writes to one console; without animation unless it is a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        if not console.is_terminal:
            console.width = PLAIN_WIDTH

    def print(self, text: str, style: str = "") -> None:
        """Print a paragraph of plain text; wraps it only on a terminal."""
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.console.print()
        self.console.print(Text(text, style="bold cyan"))

    @contextmanager
    def job_progress(self, wanted: Mapping[str | None, int]) -> Iterator["JobBars"]:
        """Bars for the jobs of each adapter and for the webhooks. `wanted` is the number of jobs by adapter."""
        bars = JobBars(self.console, wanted)
        with bars.progress:
            yield bars

    def answers(self, prompt: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print the answers to one prompt in a table. `rows` are (adapter, rank, answer)."""
        self.heading(f"One prompt, {len(rows)} answers: {prompt}")
        table = Table(box=box.ROUNDED, show_lines=True, expand=True)
        table.add_column("adapter", style="bold", no_wrap=True)
        table.add_column("rank", justify="right", no_wrap=True)
        table.add_column("answer", ratio=1, overflow="fold")
        for who, rank, text in rows:
            table.add_row(who, rank or "-", Text(text.strip()))
        self.console.print(table)

    def query(self, sql: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a query and its rows."""
        self.console.print(Syntax(sql, "sql", background_color="default", theme="ansi_dark"))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column, value in rows[0].items() if rows else ():
            table.add_column(column, justify="left" if isinstance(value, str) else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(str, row.values()))
        self.console.print(table)

    def commands(self, commands: Mapping[str, str]) -> None:
        """Print commands with their purpose; each command is on one line, so that it can be copied."""
        for command, purpose in commands.items():
            self.console.print(Text.assemble(("  # " + purpose, "dim")))
            self.console.print(Text("  " + command), soft_wrap=True)


class JobBars:
    """Progress of jobs and webhooks: bars on a terminal, a line per quarter elsewhere."""

    QUARTERS = 4

    def __init__(self, console: Console, wanted: Mapping[str | None, int]) -> None:
        self._console = console
        self._num_jobs = sum(wanted.values())
        self._quarter = 0
        columns = (
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bars: dict[str | None, TaskID] = {
            adapter: self.progress.add_task(f"{adapter or BASE:<{NAME_WIDTH}}", total=count)
            for adapter, count in wanted.items()
        }
        self._webhooks = self.progress.add_task(f"{'webhooks':<{NAME_WIDTH}}", total=self._num_jobs)

    def update(self, now: JobProgress) -> None:
        """Show the progress of the jobs."""
        for adapter, bar in self._bars.items():
            self.progress.update(bar, completed=now.finished[adapter])
        self.progress.update(self._webhooks, completed=now.webhooks)
        num_finished = now.finished.total()
        quarter = num_finished * self.QUARTERS // self._num_jobs
        if self.progress.disable and quarter > self._quarter:
            self._quarter = quarter
            self._console.print(
                f"    {num_finished} of {self._num_jobs} jobs finished, {now.webhooks} webhooks received"
            )
