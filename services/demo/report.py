"""What the demo says in the end."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.demo.processes import LoraqProcess
from services.demo.story import Told
from services.demo.view import View
from services.localstack.config import DATABASE, StackConfig, servers
from services.localstack.files import StackFiles
from services.localstack.servers.postgres import find_program


@dataclass(frozen=True)
class Report:
    """The last page: answers, a query, where to look, the verdict."""

    told: Told
    config: StackConfig
    files: StackFiles
    processes: Sequence[LoraqProcess]
    keep: bool

    def show(self, view: View) -> None:
        """Everything; the verdict is the last line."""
        told = self.told
        view.answers(*told.side_by_side)
        view.heading("The rows in Postgres, asked with SQL")
        view.query(told.sql, told.summary)
        view.heading("Where to look")
        view.facts(self._places())
        view.heading("Verdict")
        view.say(self._timing())
        for problem in told.verdict.problems:
            view.say(f"  {problem}", style="red")
        if self.keep:
            view.say("Everything keeps running; Ctrl-C ends it.", style="bold")
        view.say(told.verdict.line)

    def _places(self) -> dict[str, str]:
        url = database_url(self.config, self.files)
        again = f"set -a; . {self.files.env}; set +a"
        up = (
            {}
            if self.keep
            else {"start again": f"loraq up --dir {self.files.directory}   # rows and adapters are kept"}
        )
        return {
            **up,
            "SQL": f'{psql()} "{url}"',
            "commands": f"{again}; loraq jobs --tenant acme",
            **({"metrics": "  ".join(f"{process.address}/metrics" for process in self.processes)} if self.keep else {}),
            "logs": str(self.files.log("*")),
        }

    def _timing(self) -> str:
        told = self.told
        rate = told.num_tokens / told.seconds
        return (
            f"{len(told.jobs)} jobs for {len(told.adapters)} adapters and the base model took {told.seconds:.1f} s, "
            f"from the first record to the last webhook: {told.num_tokens} tokens, {rate:.0f} a second."
        )


def database_url(config: StackConfig, files: StackFiles) -> str:
    """How to reach the stack's database, password included."""
    _, postgres, _ = servers(config, files)
    return postgres.url(DATABASE)


def psql() -> str:
    """The psql on the PATH, or the one that came with the embedded server."""
    return "psql" if shutil.which("psql") else find_program("psql")


def as_dict(told: Told, config: StackConfig, files: StackFiles) -> dict[str, Any]:
    """The same for machines."""
    verdict = told.verdict
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
        "database_url": database_url(config, files),
    }
