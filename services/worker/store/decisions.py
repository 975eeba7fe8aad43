"""What the database says of a candidate: taken, ended, another's, or in conflict with an earlier request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from asyncpg import Record as Row

from schemas.common import TERMINAL_STATES, JobState
from schemas.events import JobError
from services.adapters.versions import AdapterVersion
from services.worker.jobs import Candidate, Grant

MayStart: TypeAlias = Callable[[AdapterVersion | None], bool]
"""Asked of one job after another: whether the engine would take one with this adapter at once."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The job is ours. With `doom` it cannot run, and ends as failed for that reason; it may be `cancelled` already.

    `counted`: it is marked as running, and the attempt that comes is counted already.
    """

    grant: Grant
    doom: JobError | None
    counted: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is terminal already, or parked with its request: the record is not needed."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id belongs to another request of the tenant."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Another worker holds the job for that many seconds, unless it renews."""

    left_s: float


Decision: TypeAlias = Taken | Ended | Conflict | Leased


SETTLED_STATES = TERMINAL_STATES | {JobState.PARKED}


def never(_adapter: AdapterVersion | None) -> bool:
    """No job is started with its taking."""
    return False


def early_decision(candidate: Candidate, row: Row | None) -> Decision | None:
    """What can be said of a job whose id was used before without taking it; None when it may be taken.

    Where the id is known and the job has no row any more, it ended so long ago that the row is gone.
    """
    if row is None:
        return Ended()
    if row["fingerprint"] != candidate.fingerprint:
        return Conflict()
    if JobState(row["state"]) in SETTLED_STATES:
        return Ended()
    return Leased(row["lease_left_s"]) if row["lease_left_s"] else None
