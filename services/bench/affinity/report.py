"""The result of `loraq bench affinity`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routed:
    """Jobs of one route. `warm_share` is the share whose adapter was in the worker's memory when it claimed the job.

    `lost`: sent and not terminal, or without an outbox row. `duplicates`: anything beyond one per job.
    """

    jobs: int
    warm_share: float
    lost: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class Churn:
    """Jobs while a worker joins and another is killed, by key.

    A recovery is the time, in seconds, from which on every `window_jobs` jobs in a row are warm to the share
    `wanted_share`; None if the last ones before the next event are not.
    """

    jobs: int
    lost: int
    duplicates: int
    warm_share: float
    wanted_share: float
    window_jobs: int
    recovered_after_join_s: float | None
    recovered_after_kill_s: float | None


@dataclass(frozen=True, slots=True)
class AffinityReport:
    """One run; `room` is the number of adapters that one worker's memory holds."""

    jobs: int
    adapters: int
    room: int
    workers: int
    rate_per_s: float
    exponent: float
    by_key: Routed
    at_random: Routed
    churn: Churn | None
