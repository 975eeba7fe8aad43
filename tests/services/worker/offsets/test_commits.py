"""When offsets are committed: positions at once, metadata at intervals, everything when urgent."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.worker.offsets.commits import Commits
from services.worker.offsets.finished import decode
from services.worker.offsets.ledger import Ledger, Partition, Place

P = Partition("jobs", 0)


def ledger_of(count: int) -> Ledger:
    ledger = Ledger()
    ledger.assign([P])
    for offset in range(count):
        assert ledger.receive(Place(P, offset))
    return ledger


def test_a_position_that_moved_is_due_at_once() -> None:
    ledger = ledger_of(2)
    commits = Commits(ledger)
    assert commits.due(0.0, {P}) == {}
    ledger.finish(Place(P, 0))
    due = commits.due(0.0, {P})
    assert due[P].position == 1
    commits.acknowledged(due, 0.0)
    assert commits.due(0.0, {P}) == {}


def test_records_finished_above_the_position_are_due_at_intervals_or_when_urgent() -> None:
    ledger = ledger_of(5)
    commits = Commits(ledger, every_s=1.0)
    ledger.finish(Place(P, 3))
    commits.acknowledged(commits.due(10.0, {P}), 10.0)
    ledger.finish(Place(P, 4))
    assert commits.due(10.5, {P}) == {}
    assert commits.due(10.5, {P}, urgent=True)[P].position == 0
    [commit] = commits.due(11.0, {P}).values()
    decoded = decode(commit.position, commit.metadata)
    assert decoded is not None
    assert [offset in decoded for offset in range(6)] == [False, False, False, True, True, False]


def test_records_that_finish_during_a_commit_are_still_unsaved() -> None:
    ledger = ledger_of(4)
    commits = Commits(ledger)
    ledger.finish(Place(P, 2))
    due = commits.due(5.0, {P})
    ledger.finish(Place(P, 3))
    commits.acknowledged(due, 5.0)
    assert P in commits.due(6.0, {P})


def test_partitions_of_other_workers_are_not_committed() -> None:
    ledger = ledger_of(1)
    ledger.finish(Place(P, 0))
    assert Commits(ledger).due(0.0, set(), urgent=True) == {}


def test_a_partition_whose_metadata_does_not_fit_is_crowded_until_it_fits() -> None:
    ledger = ledger_of(400)
    commits = Commits(ledger, max_chars=30)
    for offset in range(1, 400):
        if offset % 7 and offset % 11:
            ledger.finish(Place(P, offset))
    assert P in commits.due(0.0, {P}, urgent=True)
    assert commits.crowded == {P}
    for offset in range(1, 400):
        ledger.finish(Place(P, offset))
    assert P in commits.due(0.0, {P}, urgent=True)
    assert commits.crowded == set()


def test_halving_the_metadata_limit_ends_with_no_metadata() -> None:
    ledger = ledger_of(200)
    commits = Commits(ledger)
    for offset in random.Random(3).sample(range(1, 200), 90):
        ledger.finish(Place(P, offset))
    texts = []
    for _ in range(14):
        texts.append(commits.due(0.0, {P}, urgent=True)[P].metadata)
        commits.halve_metadata()
    assert len(texts[0]) > 50
    assert texts[-1] == ""
    assert texts == sorted(texts, key=len, reverse=True)


@given(st.lists(st.integers(0, 59), unique=True), st.integers(0, 59))
def test_a_restart_redelivers_only_unfinished_records(finished: list[int], cut: int) -> None:
    """Whichever records finished, and whichever commit was the last: no unfinished record is skipped."""
    ledger = ledger_of(60)
    commits = Commits(ledger)
    for offset in finished[:cut]:
        ledger.finish(Place(P, offset))
    due = commits.due(0.0, {P}, urgent=True)
    if P not in due:
        return
    later = Ledger()
    decoded = decode(due[P].position, due[P].metadata)
    later.assign([P], {P: decoded} if decoded else None)
    again = [offset for offset in range(due[P].position, 60) if later.receive(Place(P, offset))]
    assert set(again) == set(range(60)) - set(finished[:cut])
