"""Which job ended the engine. Pure policy.

When the engine ends with several jobs in it, none is charged: they come back in halves, each half with the engine for
itself, and what ends it again is halved again. A job that ends it alone is charged an attempt. So a bad job is found in
as many ends as its batch can be halved, and takes none of its batch-mates' attempts with it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from services.worker.jobs import NO_TRIAL

JobT = TypeVar("JobT")


class Verdict(NamedTuple, Generic[JobT]):
    """`charged` ended the engine alone; `again` are halves with the number of the trial that each stands."""

    charged: JobT | None
    again: list[tuple[int, list[JobT]]]


class Suspects(Generic[JobT]):
    """Jobs that wait for an empty engine, and the numbers of their trials: jobs of one number stand it together."""

    def __init__(self, trial_of: Callable[[JobT], int]) -> None:
        self._trial_of = trial_of
        self._numbers = itertools.count(NO_TRIAL + 1)
        self._waiting: deque[JobT] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def fresh(self) -> int:
        """The number of a trial of its own."""
        return next(self._numbers)

    def judge(self, jobs: Sequence[JobT]) -> Verdict[JobT]:
        """The engine ended with these jobs in it."""
        if len(jobs) == 1:
            return Verdict(jobs[0], [])
        middle = len(jobs) // 2
        halves = [half for half in (list(jobs[:middle]), list(jobs[middle:])) if half]
        return Verdict(None, [(self.fresh(), half) for half in halves])

    def add(self, jobs: Sequence[JobT]) -> None:
        """These wait for their trial."""
        self._waiting.extend(jobs)

    def next_trial(self) -> list[JobT]:
        """The jobs that have the engine next, those of the oldest one's number; empty when none waits."""
        if not self._waiting:
            return []
        number = self._trial_of(self._waiting[0])
        together = [job for job in self._waiting if self._trial_of(job) == number]
        self._waiting = deque(job for job in self._waiting if self._trial_of(job) != number)
        return together

    def remove(self, gone: Callable[[JobT], bool]) -> list[JobT]:
        """Take out every job that matches."""
        removed = [job for job in self._waiting if gone(job)]
        self._waiting = deque(job for job in self._waiting if not gone(job))
        return removed
