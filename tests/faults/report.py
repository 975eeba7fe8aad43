"""The report: a line per run, a table row per experiment, and docs/reliability.md with the runs of one commit."""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.faults.checker import Figures
from tests.faults.experiment import EXPERIMENTS, Verdict
from tests.faults.stack import Stack
from tests.servers.kafka import VERSION

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
STORE = ROOT / ".faults" / "runs.jsonl"
MAX_SHOWN = 6
SEEDS = 5
PRODUCT = ("engine", "migrations", "schemas", "services")
SUITE = ("tests/faults", "tests/servers")

HEAD = """# Reliability

This page holds the results of `make faults`. It runs the worker and the dispatcher as processes against one Apache
Kafka broker (`acks=all`), one PostgreSQL (fsync and synchronous commit on) and an S3-compatible store, and injects
one fault per row. Each run has its own database, topics and traffic: in addition to the jobs, about 3 % of the
records are sent twice and 1 % are not valid jobs. The producer sends a record again, with the same job_id, until the
broker acknowledges it. After each run a checker reads the topics, the tables, the webhooks that the receiver recorded
and the engines' journal, and asserts P1 to P6 of the [guarantees](guarantees.md). During the run a watch looks for
offsets that are committed before the records below them have ended.

*lost*: records without a final outcome (a terminal row or a dead letter). *duplicate rows*: rows of `jobs`, `results`
and `outbox` beyond the expected one. *early webhooks*: webhooks that arrived before their row was committed. *calls
per job*: requests that reached an engine, per job. A row fails if any run broke a promise, or if the row's
expectation was not met. The engine is a stub whose prompts set its latency, unless a note says "real engine". A row
with dashes measures something else; its result is below the table.
"""
MUTANTS = """
## Testing the checker

`tests/faults/test_checker.py` breaks one promise at a time in a snapshot and asserts that the checker reports it.
`make faults MUTANTS=1` runs the product with a defect patched in from outside; the checker must catch each one:

"""


@dataclass(frozen=True)
class Run:
    """A stored run: its verdict, its date, and the commit of the suite."""

    verdict: Verdict
    date: str
    suite: str


@dataclass(frozen=True)
class Row:
    """All runs of one experiment, as the table shows them."""

    row: str
    seeds: int
    jobs: int
    lost: int
    duplicates: int
    orphan_webhooks: int
    calls_per_job: float
    seconds: float
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def format_verdict(which: str, verdict: Verdict) -> str:
    """The lines printed when a run ends."""
    found = verdict.figures
    outcome = "ok" if not verdict.problems else f"{len(verdict.problems)} PROBLEMS"
    text = (
        f"{which:>8} seed {verdict.seed}: {outcome}; {found.jobs} jobs, {found.lost} lost, {found.duplicates} duplicate"
        f" rows, {found.orphan_webhooks} early webhooks, {found.calls} engine calls, {verdict.seconds:.1f} s"
    )
    return "\n    ".join(["; ".join([text, *verdict.notes]), *verdict.problems[:MAX_SHOWN]])


def summarize(verdicts: Iterable[Verdict]) -> list[Row]:
    """A row per experiment."""
    rows: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.row, []).append(verdict)
    return [_row(name, runs) for name, runs in rows.items()]


def _row(name: str, runs: list[Verdict]) -> Row:
    jobs = sum(run.figures.jobs for run in runs)
    return Row(
        row=name,
        seeds=len(runs),
        jobs=jobs,
        lost=sum(run.figures.lost for run in runs),
        duplicates=sum(run.figures.duplicates for run in runs),
        orphan_webhooks=sum(run.figures.orphan_webhooks for run in runs),
        calls_per_job=round(sum(run.figures.calls for run in runs) / jobs, 3) if jobs else 0.0,
        seconds=round(sum(run.seconds for run in runs), 1),
        problems=tuple(f"seed {run.seed}: {problem}" for run in runs for problem in run.problems),
        notes=tuple(note for run in runs for note in run.notes),
    )


def table(rows: Iterable[Row]) -> str:
    """The one-page table, as Markdown."""
    head = "| # | fault | seeds | jobs | lost | duplicate rows | early webhooks | calls per job | seconds | result |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for each in rows:
        which = EXPERIMENTS[each.row]
        figures = (f"{each.jobs:,}", each.lost, each.duplicates, each.orphan_webhooks, f"{each.calls_per_job:.2f}")
        outcome = "passed" if not each.problems else f"**failed** ({len(each.problems)} problems)"
        checked = figures if which.checked else ("-",) * len(figures)  # otherwise the row judges itself
        cells = (each.row, which.fault, each.seeds, *checked, each.seconds, outcome)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def store_verdict(verdict: Verdict) -> None:
    """Store a verdict immediately, so that an interrupted session loses only its current run."""
    _append({"verdict": asdict(verdict), "date": datetime.now(UTC).date().isoformat(), "suite": commit(*SUITE)})


def store_mutant(name: str, outcome: str) -> None:
    """Store the outcome of a mutant."""
    _append({"mutant": name, "outcome": outcome})


def _append(entry: dict[str, Any]) -> None:
    STORE.parent.mkdir(exist_ok=True)
    with STORE.open("a") as store:
        store.write(json.dumps(entry | {"product": commit(*PRODUCT)}) + "\n")


def load_runs(product: str) -> tuple[list[Run], dict[str, str]]:
    """For that commit of the product: the newest run of each row and seed, sorted, and the newest outcome of each
    mutant."""
    runs: dict[tuple[str, int], Run] = {}
    mutants: dict[str, str] = {}
    for entry in map(json.loads, STORE.read_text().splitlines()):
        if entry["product"] != product:
            continue
        if "mutant" in entry:
            mutants[entry["mutant"]] = entry["outcome"]
        else:
            run = Run(_verdict(entry["verdict"]), entry["date"], entry["suite"])
            runs[run.verdict.row, run.verdict.seed] = run
    order = list(EXPERIMENTS)
    known = [key for key in runs if key[0] in EXPERIMENTS]
    return [runs[key] for key in sorted(known, key=lambda key: (order.index(key[0]), key[1]))], mutants


def _verdict(entry: dict[str, Any]) -> Verdict:
    lists = {name: tuple(entry[name]) for name in ("problems", "notes")}
    return Verdict(**entry | {"figures": Figures(**entry["figures"])} | lists)


def write(versions: dict[str, str]) -> str:
    """Write the page if every row has all its seeds for the current product; returns a message."""
    product = commit(*PRODUCT)
    runs, mutants = load_runs(product)
    missing = incomplete_rows(runs)
    if missing:
        return f"{PAGE.name} is unchanged: for commit {product}, rows {', '.join(missing)} lack runs"
    PAGE.write_text(page(runs, mutants, product, versions))
    return f"wrote {PAGE.name} with the runs of commit {product}"


def incomplete_rows(runs: Iterable[Run]) -> list[str]:
    """Rows of the table that have fewer than `SEEDS` runs."""
    counts = Counter(run.verdict.row for run in runs)
    return [row for row, which in EXPERIMENTS.items() if not which.extra and counts[row] < SEEDS]


def page(runs: Sequence[Run], mutants: dict[str, str], product: str, versions: dict[str, str]) -> str:
    """docs/reliability.md."""
    rows = summarize(run.verdict for run in runs)
    parts = [HEAD, _provenance(runs, product, versions), table(rows), "\n## What each row must show\n"]
    parts += [_expectation(each) for each in rows]
    if mutants:
        parts.append(MUTANTS + "\n".join(f"- `{name}`: {outcome}" for name, outcome in mutants.items()))
    return "\n".join(parts) + "\n"


def _provenance(runs: Sequence[Run], product: str, versions: dict[str, str]) -> str:
    sessions: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        sessions.setdefault((run.date, run.suite), []).append(run.verdict.row)
    by = "; ".join(
        f"{date}, with the suite at commit {suite}: rows {', '.join(dict.fromkeys(rows))}"
        for (date, suite), rows in sessions.items()
    )
    with_versions = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"""Sources: `make faults`, for the extras `make faults FAULTS=kills` and `make faults FAULTS=backlog`, for
the list of mutants `make faults MUTANTS=1`; all with the product at commit {product}. {by}.

With {with_versions}.
"""


def _expectation(row: Row) -> str:
    which = EXPERIMENTS[row.row]
    return f"- **{row.row}** {which.fault}: {which.expected}.{_observed(row)}"


def _observed(row: Row) -> str:
    observed = f" Observed: {'; '.join(dict.fromkeys(row.notes))}." if row.notes else ""
    shown = "".join(f"\n  - {problem}" for problem in row.problems[:MAX_SHOWN])
    return observed + (f" **Problems:**{shown}" if shown else "")


def versions(stack: Stack) -> dict[str, str]:
    """Versions and settings of the environment."""
    server = stack.postgres.sql("show server_version").strip()
    commit_mode = stack.postgres.sql("show synchronous_commit").strip()
    return {
        "Apache Kafka": VERSION,
        "PostgreSQL": f"{server} (synchronous_commit {commit_mode})",
        "aiokafka": version("aiokafka"),
        "asyncpg": version("asyncpg"),
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def commit(*parts: str) -> str:
    """The newest commit that changed these paths, marked if they have uncommitted changes."""
    changed = _git("status", "--porcelain", "--", *parts)
    return (_git("log", "-1", "--format=%h", "--", *parts) or "unknown") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
