"""Metrics of finished jobs, a batch at a time: counting each job by itself costs more than running it through.

Only the sum of a batch reaches the library, with what it would have counted one by one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import Histogram

from schemas.common import JobState
from services import telemetry
from services.worker.effects import Completion
from services.worker.protocol import Finished


def observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """As `histogram.observe` of each value."""
    if not values:
        return
    buckets, bounds = histogram._buckets, histogram._upper_bounds  # noqa: SLF001  # the library takes one at a time
    for index, count in Counter(bisect_left(bounds, value) for value in values).items():
        buckets[index].inc(count)
    histogram._sum.inc(sum(values))  # noqa: SLF001


def count_finished(completions: Sequence[Completion], now: float) -> None:
    """Count committed jobs; `now` is monotonic seconds."""
    ends = Counter((each.job.lane, each.outcome.state, _code(each)) for each in completions)
    for (lane, state, code), count in ends.items():
        telemetry.JOBS_FINISHED.labels(lane=lane, state=state, error_code=code).inc(count)
    for lane in {lane for lane, _, _ in ends}:
        waits = [now - each.job.candidate.received_at for each in completions if each.job.lane == lane]
        observe_all(telemetry.PROCESS_SECONDS.labels(lane=lane), waits)
    outputs = [(each.outcome.state, each.outcome.finished) for each in completions if each.outcome.finished]
    _count_wasted(finished for state, finished in outputs if state is not JobState.SUCCEEDED)
    _count_outputs([finished for state, finished in outputs if state is JobState.SUCCEEDED])


def _code(each: Completion) -> str:
    return str(each.outcome.error.code) if each.outcome.error else ""


def _count_wasted(outputs: Iterable[Finished]) -> None:
    if wasted := sum(finished.completion_tokens for finished in outputs):
        telemetry.TOKENS.labels(kind="wasted").inc(wasted)


def _count_outputs(outputs: Sequence[Finished]) -> None:
    if not outputs:
        return
    for kind in ("prompt", "cached", "completion"):
        telemetry.TOKENS.labels(kind=kind).inc(sum(getattr(finished, f"{kind}_tokens") for finished in outputs))
    observe_all(telemetry.REQUEST_SECONDS, [_duration_s(finished) for finished in outputs])
    begun = [(finished, finished.first_token_s) for finished in outputs if finished.first_token_s is not None]
    observe_all(telemetry.FIRST_TOKEN_SECONDS, [first_token_s for _, first_token_s in begun])
    rests = [
        max(0.0, _duration_s(finished) - first_token_s) / (finished.completion_tokens - 1)
        for finished, first_token_s in begun
        if finished.completion_tokens > 1
    ]
    observe_all(telemetry.OUTPUT_TOKEN_SECONDS, rests)


def _duration_s(finished: Finished) -> float:
    return (finished.finished_ns - finished.added_ns) / 1e9


def count_started(waits: Iterable[tuple[str, float]]) -> None:
    """Count jobs that were handed to the engine: (lane, seconds in the backlog)."""
    by_lane: dict[str, list[float]] = {}
    for lane, seconds in waits:
        by_lane.setdefault(lane, []).append(seconds)
    for lane, all_seconds in by_lane.items():
        observe_all(telemetry.QUEUE_SECONDS.labels(lane=lane), all_seconds)
