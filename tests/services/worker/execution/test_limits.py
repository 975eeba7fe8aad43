"""Limits on attempts, running time and output size, without engine or clock."""

from dataclasses import replace
from datetime import date

import pytest

from schemas.common import JobState, Lane
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.worker.engine.protocol import Finished
from services.worker.execution.limits import Limits
from services.worker.jobs import Candidate, Claim, Job, JobKey, Outcome, Record
from services.worker.offsets.ledger import Partition, Place

LIMITS = Limits(places=8, capacity=8, default_timeout_s=60.0, max_attempts=3, max_result_bytes=4)
FINISHED = Finished("1", (1,), "x", "stop", 1, 0, 1, None, 0.0, 0, 0)


def job(*, attempts: int = 0, timeout_ms: int | None = None) -> Job:
    request = JobRequest(tenant="acme", prompt="x", timeout_ms=timeout_ms)
    record = Record(Place(Partition("jobs", 0), 0), Lane.STANDARD, None, b"", (), 0)
    candidate = Candidate(JobKey("acme", uuid7()), request, b"", record, None, 0.0, 0)
    return Job(candidate, Claim(1, date(2026, 11, 29), 0.0, 0, None, None), 0.0, [record.place], attempts=attempts)


def error_of(outcome: Outcome | None) -> tuple[str, str]:
    assert outcome is not None
    assert outcome.error is not None
    return str(outcome.error.code), outcome.error.message


def test_the_output_limit_is_in_bytes() -> None:
    assert LIMITS.outcome(job(), FINISHED._replace(text="éé")).state is JobState.SUCCEEDED
    code, message = error_of(LIMITS.outcome(job(), FINISHED._replace(text="ééx")))
    assert code == "result_too_large"
    assert "has 5 bytes, more than LORAQ_MAX_RESULT_BYTES, 4" in message


def test_a_job_fails_when_its_attempts_are_exhausted() -> None:
    assert LIMITS.exhausted(job(attempts=2), "it fell") is None
    assert LIMITS.last_of_several_is_next(job(attempts=2))
    assert not LIMITS.last_of_several_is_next(job(attempts=1))
    assert not replace(LIMITS, max_attempts=1).last_of_several_is_next(job())
    code, message = error_of(LIMITS.exhausted(job(attempts=3), "it fell"))
    assert code == "engine_error"
    assert message == "the engine failed on this job 3 times (LORAQ_MAX_ATTEMPTS): it fell"


@pytest.mark.parametrize(("timeout_ms", "bound_s"), [(None, 60.0), (1500, 1.5)])
def test_a_job_is_overdue_after_its_own_timeout_or_the_default(timeout_ms: int | None, bound_s: float) -> None:
    running = job(timeout_ms=timeout_ms)
    running.started_at = 100.0
    assert not LIMITS.is_overdue(running, 100.0 + bound_s)
    assert LIMITS.is_overdue(running, 100.1 + bound_s)
    assert error_of(LIMITS.timed_out(running)) == ("timeout", f"the job ran longer than its {round(bound_s * 1000)} ms")
