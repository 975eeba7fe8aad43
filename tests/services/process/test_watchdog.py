"""A part is stuck only if it had work all the time and made no progress."""

from hypothesis import given
from hypothesis import strategies as st

from services.process.watchdog import Part, ProgressWatch

LIMIT_S = 10.0


def test_work_without_progress_is_reported_after_the_limit() -> None:
    watch = ProgressWatch(LIMIT_S)
    parts = {"still": Part(True, 1), "idle": Part(False, 1)}
    assert watch.stuck(parts, 0.0) == []
    assert watch.stuck(parts, 9.9) == []
    assert watch.stuck(parts, 10.0) == ["still"]


def test_a_reset_starts_over() -> None:
    watch = ProgressWatch(LIMIT_S)
    parts = {"still": Part(True, 1)}
    watch.stuck(parts, 0.0)
    watch.reset()
    assert watch.stuck(parts, 12.0) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=40))
def test_stuck_means_work_without_progress_for_the_whole_limit(seconds: list[tuple[bool, int]]) -> None:
    watch = ProgressWatch(LIMIT_S)
    for now, (has_work, progress) in enumerate(seconds):
        stuck = watch.stuck({"part": Part(has_work, progress)}, float(now))
        recent = seconds[max(0, now - 10) : now + 1]
        assert bool(stuck) == (len(recent) == 11 and set(recent) == {(True, progress)} and has_work)
