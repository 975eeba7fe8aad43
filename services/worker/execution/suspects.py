"""Finds the job that crashed the engine. Pure policy.

When the engine crashes with several jobs in it, none is charged an attempt. They run again in halves, each half alone
in the engine, and a half that crashes it is halved again. A job that crashes it alone is charged an attempt. So a bad
job is found after log2(batch size) crashes, at the cost of no attempt of the others.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from services.worker.jobs import NO_TRIAL

JobT = TypeVar("JobT")


class Verdict(NamedTuple, Generic[JobT]):
    """`charged` crashed the engine alone; `again` holds the halves to run again, each with the number of its trial."""

    charged: JobT | None
    again: list[tuple[int, list[JobT]]]


class Suspects(Generic[JobT]):
    """Jobs that wait for an empty engine; those with the same trial number run together."""

    def __init__(self, trial_of: Callable[[JobT], int]) -> None:
        self._trial_of = trial_of
        self._numbers = itertools.count(NO_TRIAL + 1)
        self._waiting: deque[JobT] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def new_trial(self) -> int:
        """The number of a new trial."""
        return next(self._numbers)

    def judge(self, jobs: Sequence[JobT]) -> Verdict[JobT]:
        """Decide about the jobs that were in the engine when it crashed."""
        if len(jobs) == 1:
            return Verdict(jobs[0], [])
        middle = len(jobs) // 2
        halves = [half for half in (list(jobs[:middle]), list(jobs[middle:])) if half]
        return Verdict(None, [(self.new_trial(), half) for half in halves])

    def add(self, jobs: Sequence[JobT]) -> None:
        """Queue jobs for their trials."""
        self._waiting.extend(jobs)

    def next_trial(self) -> list[JobT]:
        """Remove and return the jobs of the oldest trial; empty if none waits."""
        if not self._waiting:
            return []
        number = self._trial_of(self._waiting[0])
        together = [job for job in self._waiting if self._trial_of(job) == number]
        self._waiting = deque(job for job in self._waiting if self._trial_of(job) != number)
        return together

    def remove(self, gone: Callable[[JobT], bool]) -> list[JobT]:
        """Remove and return every job that matches."""
        removed = [job for job in self._waiting if gone(job)]
        self._waiting = deque(job for job in self._waiting if not gone(job))
        return removed
