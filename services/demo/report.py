"""The demo's final output."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.demo.processes import LoraqProcess
from services.demo.scenario import DemoResult
from services.demo.view import View
from services.localstack.servers.postgres import find_program


@dataclass(frozen=True)
class Report:
    """The final output: answers, a query, the next commands, the totals. `directory` is as the user gave it."""

    result: DemoResult
    directory: Path
    database_url: str
    processes: Sequence[LoraqProcess]
    keep: bool

    def show(self, view: View) -> None:
        """Print everything; the totals are the last line."""
        result = self.result
        view.answers(*result.side_by_side)
        view.heading("The rows in Postgres, queried with SQL")
        view.query(result.sql, result.summary)
        self._show_commands(view)
        view.heading("Result")
        view.print(self._timing())
        for problem in result.check.problems:
            view.print(f"  {problem}", style="red")
        view.print(result.check.line)

    def _show_commands(self, view: View) -> None:
        loraq = command_name()
        query = {
            f'{psql()} "{self.database_url}"': "query with SQL",
            f"set -a; . {self.directory / 'stack.env'}; set +a": "load the settings for the next commands",
        }
        if self.keep:
            view.heading("Everything keeps running until Ctrl-C. Meanwhile, in another terminal:")
            message = '--message "Where are you?" --wait'
            view.commands({**query, f"{loraq} submit --tenant acme --adapter pirate {message}": "submit another job"})
            for process in self.processes:
                view.print(f"  {process.name}: {process.address}/metrics")
        else:
            view.heading("Rows and adapters are kept. To look at them later:")
            start = {f"{loraq} up --dir {self.directory}": "start the servers again"}
            stop = {f"{loraq} down --dir {self.directory}": "stop them"}
            view.commands({**start, **query, f"{loraq} jobs show --tenant acme": "list the newest jobs", **stop})
        view.print(f"  Logs: {self.directory / 'logs'}")

    def _timing(self) -> str:
        result = self.result
        rate = result.num_tokens / result.seconds
        return (
            f"{len(result.jobs)} jobs for {len(result.adapters)} adapters and the base model took"
            f" {result.seconds:.1f} s from the first record to the last webhook:"
            f" {result.num_tokens} tokens, {rate:.0f} per second."
        )


def command_name() -> str:
    """How to run `loraq` from here: by name if it is on the PATH, otherwise by its path."""
    called = sys.argv[0]
    if shutil.which("loraq") == called or not called.endswith("loraq"):
        return "loraq"
    return os.path.relpath(called)


def psql() -> str:
    """The psql on the PATH, or that of the embedded PostgreSQL."""
    return "psql" if shutil.which("psql") else os.path.relpath(find_program("psql"))


def as_dict(report: Report) -> dict[str, Any]:
    """The report for --json."""
    result, check = report.result, report.result.check
    prompt, answers = result.side_by_side
    return {
        "jobs": check.jobs,
        "succeeded": check.succeeded,
        "lost": check.lost,
        "rows": check.rows,
        "webhooks_verified": check.webhooks_verified,
        "problems": list(check.problems),
        "seconds": round(result.seconds, 3),
        "output_tokens": result.num_tokens,
        "adapters": list(result.summary),
        "prompt": prompt,
        "answers": {who: text for who, _, text in answers},
        "database_url": report.database_url,
    }
