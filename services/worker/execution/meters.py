"""Metrics of started jobs."""

from collections.abc import Iterable

from services.process import telemetry
from services.process.metrics import observe_all


def count_started(waits: Iterable[tuple[str, float]]) -> None:
    """Record started jobs, each as (lane, seconds in the backlog)."""
    by_lane: dict[str, list[float]] = {}
    for lane, seconds in waits:
        by_lane.setdefault(lane, []).append(seconds)
    for lane, all_seconds in by_lane.items():
        observe_all(telemetry.QUEUE_SECONDS.labels(lane=lane), all_seconds)
