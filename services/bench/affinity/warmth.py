"""The share of jobs that found their adapter loaded, over all jobs and over time. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Ran:
    """A job that ended: when its worker claimed it, and whether its adapter was loaded there at that moment."""

    claimed_at: datetime
    warm: bool


def share(jobs: Sequence[Ran]) -> float:
    """Share of warm jobs; 0 without jobs."""
    return sum(job.warm for job in jobs) / len(jobs) if jobs else 0.0


def recovery_s(jobs: Sequence[Ran], event: datetime, wanted: float, window: int) -> float | None:
    """Seconds after `event` from which on every `window` jobs in a row, in order of their claims, reach the share
    `wanted`; None if the last ones do not, or if there are too few. Windows begin after the event.
    """
    after = sorted((job for job in jobs if job.claimed_at >= event), key=lambda job: job.claimed_at)
    if len(after) < window:
        return None
    warm, recovered_at = sum(job.warm for job in after[:window]), after[0].claimed_at
    for end in range(window, len(after) + 1):
        if warm < wanted * window:
            if end == len(after):
                return None
            recovered_at = after[end].claimed_at
        if end < len(after):
            warm += after[end].warm - after[end - window].warm
    return (recovered_at - event).total_seconds()
