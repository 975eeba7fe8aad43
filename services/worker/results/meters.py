"""Metrics of finished jobs, updated once per batch.

Updating them per job costs more than the rest of a job's processing. The totals are the same.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from schemas.common import JobState, Lane
from services.process import telemetry
from services.process.metrics import observe_all
from services.worker.engine.protocol import Finished
from services.worker.store.effects import Completion


def count_finished(completions: Sequence[Completion], now: float) -> None:
    """Count committed jobs; `now` is monotonic seconds."""
    ends = Counter([(each.job.lane, each.outcome.state, _code(each)) for each in completions])
    for (lane, state, code), count in ends.items():
        telemetry.JOBS_FINISHED.labels(lane=lane, state=state, error_code=code).inc(count)
    waits: dict[Lane, list[float]] = {}
    for each in completions:
        waits.setdefault(each.job.lane, []).append(now - each.job.candidate.received_at)
    for lane, seconds in waits.items():
        observe_all(telemetry.PROCESS_SECONDS.labels(lane=lane), seconds)
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
    for kind, counts in (
        ("prompt", [finished.prompt_tokens for finished in outputs]),
        ("cached", [finished.cached_tokens for finished in outputs]),
        ("completion", [finished.completion_tokens for finished in outputs]),
    ):
        telemetry.TOKENS.labels(kind=kind).inc(sum(counts))
    durations = [(finished.finished_ns - finished.added_ns) / 1e9 for finished in outputs]
    observe_all(telemetry.REQUEST_SECONDS, durations)
    first = [finished.first_token_s for finished in outputs if finished.first_token_s is not None]
    observe_all(telemetry.FIRST_TOKEN_SECONDS, first)
    rests = [
        max(0.0, duration - finished.first_token_s) / (finished.completion_tokens - 1)
        for finished, duration in zip(outputs, durations, strict=True)
        if finished.first_token_s is not None and finished.completion_tokens > 1
    ]
    observe_all(telemetry.OUTPUT_TOKEN_SECONDS, rests)
