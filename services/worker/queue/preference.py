"""Which worker should claim a parked job that is due. Pure policy; the claim statement applies it.

a worker that has the job's adapter in memory and is not saturated      at once
the least loaded, when no other such worker is known                    at once
any worker                                                              `PREFER_HOLDER_S` after the job was due
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PREFER_HOLDER_S = 2.0
SLACK_JOBS = 8
SLACK_SHARE = 1.25
"""Loads are reported once a second, so a worker counts as least loaded up to this many times the smallest load."""


@dataclass(frozen=True, slots=True)
class Standpoint:
    """What a worker knows when it claims. `recent` are adapters loaded after its last report."""

    recent: Collection[str] = ()
    saturated: bool = False
    least_loaded: bool = True


def is_least_loaded(own: int, others: Sequence[int]) -> bool:
    """Whether no live worker has clearly fewer jobs."""
    return own <= min(others, default=own) * SLACK_SHARE + SLACK_JOBS
