"""The job that crashes the engine is found, and no other job is charged."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.worker.execution.suspects import Suspects
from services.worker.jobs import NO_TRIAL

MAX_ATTEMPTS = 3


class Pool:
    """A worker whose engine crashes if a `poison` job is in it, after some of the other jobs have finished."""

    def __init__(self, size: int, poison: set[int], luck: st.DataObject) -> None:
        self.poison = poison
        self.luck = luck
        self.trials = dict.fromkeys(range(size), NO_TRIAL)
        self.charged = dict.fromkeys(range(size), 0)
        self.done: set[int] = set()
        self.failed: set[int] = set()
        self.crashes = 0
        self.suspects = Suspects[int](self.trials.__getitem__)

    def run(self, batch: list[int]) -> None:
        if not self.poison & set(batch):
            self.done |= set(batch)
            return
        self.crashes += 1
        lucky = self.luck.draw(st.sets(st.sampled_from(batch))) - self.poison
        self.done |= lucky
        verdict = self.suspects.judge([job for job in batch if job not in lucky])
        if verdict.charged is not None:
            self.charge(verdict.charged)
        for number, half in verdict.again:
            self.trials |= dict.fromkeys(half, number)
            self.suspects.add(half)

    def charge(self, job: int) -> None:
        self.charged[job] += 1
        if self.charged[job] == MAX_ATTEMPTS:
            self.failed.add(job)
        else:
            self.trials[job] = self.suspects.new_trial()
            self.suspects.add([job])


@given(st.integers(1, 40), st.data())
def test_only_jobs_that_crash_the_engine_are_charged_and_all_jobs_end(size: int, data: st.DataObject) -> None:
    poison = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
    pool = Pool(size, poison, data)
    pool.run(list(range(size)))
    while batch := pool.suspects.next_trial():
        pool.run(batch)
    assert pool.failed == poison
    assert pool.done == set(range(size)) - poison
    assert {job: count for job, count in pool.charged.items() if count} == dict.fromkeys(poison, MAX_ATTEMPTS)
    assert pool.crashes <= len(poison) * (math.ceil(math.log2(size)) + MAX_ATTEMPTS)


def test_jobs_of_one_trial_run_together_and_alone() -> None:
    trials = {1: 7, 2: 8, 3: 7}
    suspects = Suspects[int](trials.__getitem__)
    suspects.add([1, 2])
    suspects.add([3])
    assert [suspects.next_trial() for _ in range(3)] == [[1, 3], [2], []]


def test_a_removed_job_is_in_no_trial() -> None:
    suspects = Suspects[int]({1: 1, 2: 1}.__getitem__)
    suspects.add([1, 2])
    assert suspects.remove(lambda job: job == 1) == [1]
    assert suspects.next_trial() == [2]
    assert not suspects
