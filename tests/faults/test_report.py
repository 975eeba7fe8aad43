"""The table sums up the runs, and a run with a problem fails its row."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.checker import Figures
from tests.faults.experiment import EXPERIMENTS, Verdict
from tests.faults.experiments import load

load()
GOOD = Verdict("4", 1, Figures(500, 0, 0, 0, 510), 10.0, (), ("a remark",))
BAD = Verdict("4", 2, Figures(500, 1, 0, 0, 500), 12.0, ("P1: the job x has no row",))


def test_runs_of_a_row_are_summed_up() -> None:
    [row] = report.summarize([GOOD, BAD])
    assert (row.seeds, row.jobs, row.lost, row.calls_per_job, row.seconds) == (2, 1000, 1, 1.01, 22.0)


def test_a_row_passes_only_without_any_problem() -> None:
    assert "| passed |" in report.table(report.summarize([GOOD]))
    assert "**failed**" in report.table(report.summarize([GOOD, BAD]))


def test_the_page_shows_the_newest_run_of_each_row_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "STORE", tmp_path / "runs.jsonl")
    for verdict in (replace(GOOD, seed=2), GOOD, BAD):
        report.store_verdict(verdict)
    report.store_mutant("no_fence", "caught, P2 broken")
    runs, mutants = report.load_runs(report.commit(*report.PRODUCT))
    page = report.page(runs, mutants, "0123abc", {"Apache Kafka": "4"})
    assert [run.verdict for run in runs] == [GOOD, BAD]
    assert "a remark" in page
    assert "commit 0123abc" in page
    assert "seed 2: P1: the job x has no row" in page
    assert "`no_fence`: caught, P2 broken" in page
    assert report.load_runs("another commit") == ([], {})


def test_a_page_is_written_only_when_every_row_has_all_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "reliability.md"
    monkeypatch.setattr(report, "STORE", tmp_path / "runs.jsonl")
    monkeypatch.setattr(report, "PAGE", page)
    rows = [row for row, which in EXPERIMENTS.items() if not which.extra]
    runs = [replace(GOOD, row=row, seed=seed) for row in rows for seed in range(1, report.SEEDS + 1)]
    for verdict in runs[:-1]:
        report.store_verdict(verdict)
    assert report.write({}).endswith(f"rows {rows[-1]} lack runs")
    assert not page.exists()
    report.store_verdict(runs[-1])
    assert report.write({}).startswith("wrote")
    assert page.exists()
