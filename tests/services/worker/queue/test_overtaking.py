"""Tokens that passed the oldest job, compared with a separate count for each job."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.queue.overtaking import Overtaking


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_no_job_is_passed_by_more_than_the_oldest(tokens: list[int], random) -> None:  # type: ignore[no-untyped-def]
    overtaking = Overtaking()
    waiting = dict(enumerate(tokens))
    passed = dict.fromkeys(waiting, 0)
    while waiting:
        oldest = min(waiting)
        assert overtaking.passed(oldest) == passed[oldest] == max(passed[order] for order in waiting)
        chosen = random.choice(list(waiting))
        overtaking.admit(chosen, waiting[chosen])
        for order in waiting:
            passed[order] += waiting[chosen] if order < chosen else 0
        del waiting[chosen]


def test_a_correction_counts_only_while_it_matters() -> None:
    overtaking = Overtaking()
    overtaking.admit(5, 10)
    overtaking.correct(5, 4)
    assert overtaking.passed(3) == 4
    assert overtaking.allows(3, 6, 6, bound=10)
    assert not overtaking.allows(3, 6, 7, bound=10)
    assert overtaking.allows(3, 3, 99, bound=10), "the oldest job may always go"
    assert overtaking.passed(6) == 0
    overtaking.correct(5, 40)
    assert overtaking.passed(6) == 0
