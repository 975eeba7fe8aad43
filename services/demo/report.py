"""What the demo says in the end."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.demo.processes import LoraqProcess
from services.demo.scenario import Told
from services.demo.view import View
from services.localstack.servers.postgres import find_program


@dataclass(frozen=True)
class Report:
    """The last page: answers, a query, where to look, the verdict. `directory` as the person gave it."""

    told: Told
    directory: Path
    database_url: str
    processes: Sequence[LoraqProcess]
    keep: bool

    def show(self, view: View) -> None:
        """Everything; the verdict is the last line."""
        told = self.told
        view.answers(*told.side_by_side)
        view.heading("The rows in Postgres, asked with SQL")
        view.query(told.sql, told.summary)
        self._show_places(view)
        view.heading("Verdict")
        view.say(self._timing())
        for problem in told.verdict.problems:
            view.say(f"  {problem}", style="red")
        view.say(told.verdict.line)

    def _show_places(self, view: View) -> None:
        loraq = command_name()
        ask = {
            f'{psql()} "{self.database_url}"': "ask with SQL",
            f"set -a; . {self.directory / 'stack.env'}; set +a": "let other commands find the servers, then:",
        }
        if self.keep:
            view.heading("All of it keeps running until Ctrl-C. Meanwhile, in another terminal:")
            message = '--message "Where are you?" --wait'
            view.commands({**ask, f"{loraq} submit --tenant acme --adapter pirate {message}": "one more job"})
            for process in self.processes:
                view.say(f"  {process.name}: {process.address}/metrics")
        else:
            view.heading("Rows and adapters are kept. To look at them later:")
            start = {f"{loraq} up --dir {self.directory}": "start the servers again"}
            end = {f"{loraq} down --dir {self.directory}": "end them"}
            view.commands({**start, **ask, f"{loraq} jobs show --tenant acme": "the newest jobs", **end})
        view.say(f"  Logs: {self.directory / 'logs'}")

    def _timing(self) -> str:
        told = self.told
        rate = told.num_tokens / told.seconds
        return (
            f"{len(told.jobs)} jobs for {len(told.adapters)} adapters and the base model took {told.seconds:.1f} s "
            f"from first record to last webhook: {told.num_tokens} tokens, {rate:.0f} a second."
        )


def command_name() -> str:
    """`loraq` as the person can type it here: by name if the PATH leads to it, by path otherwise."""
    called = sys.argv[0]
    if shutil.which("loraq") == called or not called.endswith("loraq"):
        return "loraq"
    return os.path.relpath(called)


def psql() -> str:
    """The psql on the PATH, or the one that came with the embedded server."""
    return "psql" if shutil.which("psql") else os.path.relpath(find_program("psql"))


def as_dict(report: Report) -> dict[str, Any]:
    """The same for machines."""
    told, verdict = report.told, report.told.verdict
    prompt, answers = told.side_by_side
    return {
        "jobs": verdict.jobs,
        "succeeded": verdict.succeeded,
        "lost": verdict.lost,
        "rows": verdict.rows,
        "webhooks_verified": verdict.webhooks_verified,
        "problems": list(verdict.problems),
        "seconds": round(told.seconds, 3),
        "output_tokens": told.num_tokens,
        "adapters": list(told.summary),
        "prompt": prompt,
        "answers": {who: text for who, _, text in answers},
        "database_url": report.database_url,
    }
