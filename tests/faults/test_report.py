"""The table adds up runs, and a run with a problem makes its row fail."""

from tests.faults import report
from tests.faults.checker import Figures
from tests.faults.experiment import Verdict
from tests.faults.experiments import load

load()
GOOD = Verdict("4", 1, Figures(500, 0, 0, 0, 510), 10.0, (), ("a remark",))
BAD = Verdict("4", 2, Figures(500, 1, 0, 0, 500), 12.0, ("P1: the job x has no row",))


def test_runs_of_a_row_are_added_up() -> None:
    [row] = report.summed([GOOD, BAD])
    assert (row.seeds, row.jobs, row.lost, row.calls_per_job, row.seconds) == (2, 1000, 1, 1.01, 22.0)


def test_a_row_passes_only_without_any_problem() -> None:
    assert "| passed |" in report.table(report.summed([GOOD]))
    assert "**failed**" in report.table(report.summed([GOOD, BAD]))


def test_the_page_says_what_was_seen_and_what_was_not_as_it_must_be() -> None:
    rows = {row.row: vars(row) for row in report.summed([GOOD, BAD])}
    page = report.page({"rows": rows, "mutants": {"no_fence": "caught, P2 broken"}, "versions": {"Apache Kafka": "4"}})
    assert "a remark" in page
    assert "seed 2: P1: the job x has no row" in page
    assert "`no_fence`: caught, P2 broken" in page
