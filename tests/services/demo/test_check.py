"""The demo's checker detects lost jobs, duplicate rows, and forged or contradicting webhooks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from schemas.common import ErrorCode, JobState, Lane
from schemas.events import JobError, JobOutcome, Timings, Usage, WebhookBody
from services.demo.check import CheckResult, Row, check
from services.demo.plan import Job
from services.webhooks.receiver import ReceivedWebhook

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = Job(uuid4(), "acme", "pirate", "Hello", Lane.STANDARD, "run")


def a_row(job: Job = JOB, **changes: Any) -> Row:
    row = Row(
        tenant=job.tenant,
        job_id=job.job_id,
        adapter=job.adapter,
        adapter_version=1,
        state=JobState.SUCCEEDED,
        error_code=None,
        error_message=None,
        metadata={"demo": "run"},
        accepted_at=NOW,
        finished_at=NOW,
        has_result=True,
        output_text="Arr",
        output_url=None,
        finish_reason="stop",
        prompt_tokens=5,
        cached_tokens=0,
        completion_tokens=2,
    )
    return replace(row, **changes)


def an_outcome(job: Job = JOB, **changes: Any) -> JobOutcome:
    fields: dict[str, Any] = {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "adapter": job.adapter,
        "adapter_version": 1,
        "state": JobState.SUCCEEDED,
        "output_text": "Arr",
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=2),
        "timings": Timings(queue_ms=1, load_ms=1, first_token_ms=1, total_ms=3),
        "metadata": {"demo": "run"},
    }
    return JobOutcome.model_validate(fields | changes, strict=False)


def a_webhook(problem: str | None = None, **changes: Any) -> ReceivedWebhook:
    body = WebhookBody(type="job.succeeded", timestamp=NOW, data=an_outcome(**changes))
    return ReceivedWebhook("id", {}, body.model_dump_json().encode(), problem)


def checked(rows: Sequence[Row], *webhooks: ReceivedWebhook) -> CheckResult:
    return check([JOB], rows, {"acme": webhooks})


def test_a_row_and_a_webhook_that_agree_pass() -> None:
    found = checked([a_row()], a_webhook())
    assert not found.problems
    assert found.line == "demo: 1 jobs, 1 succeeded, 0 lost, 1 rows, 1 webhooks verified"


def test_a_repeated_webhook_counts_once() -> None:
    assert checked([a_row()], a_webhook(), a_webhook()).webhooks_verified == 1


def test_a_job_without_row_is_lost() -> None:
    found = checked([])
    assert (found.lost, found.rows, found.succeeded) == (1, 0, 0)
    assert any("0 rows instead of one" in problem for problem in found.problems)


def test_a_job_that_never_ends_is_lost() -> None:
    found = checked([a_row(state=JobState.RUNNING, has_result=False)])
    assert found.lost == 1
    assert any("it is still running" in problem for problem in found.problems)


def test_two_rows_are_a_problem() -> None:
    assert any("2 rows instead of one" in problem for problem in checked([a_row(), a_row()], a_webhook()).problems)


def test_a_failed_job_is_reported_with_its_reason() -> None:
    row = a_row(state=JobState.FAILED, error_code="engine_error", error_message="It broke.", has_result=False)
    found = checked([row])
    assert (found.succeeded, found.lost) == (0, 0)
    assert any("failed (engine_error): It broke." in problem for problem in found.problems)


def test_success_without_a_result_row_is_a_problem() -> None:
    assert any("no result row" in problem for problem in checked([a_row(has_result=False)], a_webhook()).problems)


def test_a_missing_webhook_is_named() -> None:
    (problem,) = checked([a_row()]).problems
    assert problem == f"job {JOB.job_id} (acme/pirate): no webhook with a valid signature arrived"


def test_a_bad_signature_does_not_count() -> None:
    found = checked([a_row()], a_webhook("the signature does not match"))
    assert found.webhooks_verified == 0
    assert any("the signature does not match" in problem for problem in found.problems)


@pytest.mark.parametrize(
    "change",
    [
        {"output_text": "Ahoy"},
        {"adapter": "json"},
        {"adapter_version": 2},
        {"finish_reason": "length"},
        {"usage": None},
        {"usage": Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=3)},
        {"metadata": {}},
        {"state": JobState.FAILED},
        {"error": JobError(code=ErrorCode.ENGINE_ERROR, message="It broke.")},
        {"output_url": "https://example.com/output"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_webhook_that_contradicts_the_row_is_not_verified(change: dict[str, Any]) -> None:
    found = checked([a_row()], a_webhook(**change))
    assert found.webhooks_verified == 0
    assert any(f"its {next(iter(change))} differs from the row's" in problem for problem in found.problems)


def test_an_invalid_webhook_body_is_a_problem() -> None:
    found = checked([a_row()], ReceivedWebhook("id", {}, json.dumps({"type": "job.succeeded"}).encode(), None))
    assert any("its body is not a WebhookBody" in problem for problem in found.problems)


def test_a_webhook_of_another_run_is_ignored() -> None:
    other = Job(uuid4(), "acme", "pirate", "Hello", Lane.STANDARD, "earlier")
    assert not checked([a_row()], a_webhook(), a_webhook(job=other)).problems
