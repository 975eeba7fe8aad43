"""What the database decides about a candidate: claimed, ended, leased elsewhere, or a conflicting request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from asyncpg import Record as Row

from schemas.common import TERMINAL_STATES, JobState
from schemas.events import JobError
from services.adapters.versions import AdapterVersion
from services.worker.jobs import Candidate, Claim

MayStart: TypeAlias = Callable[[str, AdapterVersion | None], bool]
"""Called once per job: whether a job of this tenant with this adapter can start immediately."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """This worker owns the job. With a `failure` it cannot run and fails for that reason; `cancelled`: it ends at once.

    `counted`: its row is already marked as running, with the coming attempt counted.
    """

    claim: Claim
    failure: JobError | None
    counted: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is terminal, or parked with its request: the record is no longer needed."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The tenant used the job id for a different request."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Another worker holds the lease for `left_s` more seconds, unless it renews."""

    left_s: float


Decision: TypeAlias = Claimed | Ended | Conflict | Leased


SETTLED_STATES = TERMINAL_STATES | {JobState.PARKED}


def never_start(_tenant: str, _adapter: AdapterVersion | None) -> bool:
    """Start no job as part of its claim."""
    return False


def early_decision(candidate: Candidate, row: Row | None) -> Decision | None:
    """The decision about a job whose id is known; None if the job may be claimed.

    `row` is None if the id is known but the job has no row: the job ended so long ago that retention deleted the row.
    """
    if row is None:
        return Ended()
    if row["fingerprint"] != candidate.fingerprint:
        return Conflict()
    if JobState(row["state"]) in SETTLED_STATES:
        return Ended()
    return Leased(row["lease_left_s"]) if row["lease_left_s"] else None
