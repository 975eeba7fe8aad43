"""The JSON of events and webhooks, formatted by hand, matches their schemas."""

import json
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from schemas.common import MAX_INLINE_OUTPUT_BYTES, AdapterStatus, ErrorCode, JobState, Lane
from schemas.events import CloudEvent, JobError, WebhookBody
from schemas.job import JobRequest
from services.adapters.versions import AdapterVersion
from services.client.identifiers import uuid7
from services.worker.engine.protocol import Finished
from services.worker.jobs import Candidate, Claim, Job, JobKey, Outcome, Record
from services.worker.offsets.ledger import Partition, Place
from services.worker.store.effects import _utc, completion, is_large

PLACE = Place(Partition("loraq.default.jobs.standard", 1), 17)
ADAPTER = AdapterVersion("acme", "tone", 3, AdapterStatus.READY, None, "d" * 64, "s3://b/p/", 10)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SURROGATES = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)


def job(metadata: dict[str, Any], adapter: AdapterVersion | None = None) -> Job:
    request = JobRequest(
        job_id=uuid7(), tenant="acme", adapter="tone@3" if adapter else None, prompt="hello", metadata=metadata
    )
    assert request.job_id is not None
    record = Record(PLACE, Lane.STANDARD, None, b"{}", (), 0)
    candidate = Candidate(JobKey("acme", request.job_id), request, b"f" * 32, record, None, 1.0, 1)
    claim = Claim(1, date(2026, 11, 30), 0.0, 0, adapter, "https://example.org/hook")
    return Job(candidate, claim, 1.0, [PLACE], started_at=2.0)


def finished(text: str) -> Finished:
    return Finished("1", (1, 2, 3), text, "stop", 5, 2, 3, None, 0.25, 10, 20)


METADATA = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3),
    ),
    max_size=4,
)


@given(metadata=METADATA, text=SURROGATES, adapter=st.sampled_from([None, ADAPTER]))
def test_the_bodies_of_a_success_match_the_schemas(
    metadata: dict[str, Any], text: str, adapter: AdapterVersion | None
) -> None:
    made = job(metadata, adapter)
    outcome = Outcome(made, JobState.SUCCEEDED, finished=finished(text))
    done = completion(outcome, "default", 3.5, TRACEPARENT)
    event_row, webhook_row = done.effects
    event, webhook = CloudEvent.model_validate_json(event_row.body), WebhookBody.model_validate_json(webhook_row.body)
    assert json.loads(event_row.body) == event.model_dump(mode="json"), "every field, and no other"
    assert event.data == webhook.data
    assert (event.id, event.type, event.traceparent) == (str(event_row.event_id), "job.succeeded", TRACEPARENT)
    assert (event.time, event.source) == (webhook.timestamp, "/loraq/default")
    data = event.data
    assert (data.job_id, data.tenant, data.metadata) == (made.key.job_id, "acme", made.request.metadata)
    assert (data.adapter, data.adapter_version) == (("tone", 3) if adapter else (None, None))
    assert data.usage is not None
    assert (data.usage.prompt_tokens, data.usage.cached_tokens, data.usage.completion_tokens) == (5, 2, 3)
    assert (data.timings.queue_ms, data.timings.first_token_ms, data.timings.total_ms) == (1000.0, 250.0, 2500.0)
    assert webhook_row.target == "https://example.org/hook"


@given(st.integers(0, 4_000_000_000_000) | st.integers(0, 4_000_000_000).map(lambda second: second * 1000))
def test_times_are_formatted_like_the_schemas(milliseconds: int) -> None:
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    assert _utc(milliseconds) == TypeAdapter(datetime).dump_python(moment, mode="json")


@given(message=SURROGATES)
def test_a_failure_has_an_error_and_no_output(message: str) -> None:
    error = JobError.model_construct(code=ErrorCode.TIMEOUT, message=message)
    done = completion(Outcome(job({}), JobState.FAILED, error, finished("x")), "default", 3.5)
    event = CloudEvent.model_validate_json(done.effects[0].body)
    assert event.data.error is not None
    assert event.data.error.code is ErrorCode.TIMEOUT
    assert (event.data.output_text, event.data.usage, event.data.finish_reason) == (None, None, None)


@pytest.mark.parametrize(("text", "large"), [("x" * MAX_INLINE_OUTPUT_BYTES, False), ("ä" * 32769, True), ("x", False)])
def test_whether_an_output_is_large_depends_on_its_bytes(text: str, large: bool) -> None:
    assert is_large(Outcome(job({}), JobState.SUCCEEDED, finished=finished(text))) is large


def test_event_ids_are_unique() -> None:
    outcome = Outcome(job({}), JobState.SUCCEEDED, finished=finished("x"))
    ids = {completion(outcome, "p", 1.0).effects[0].event_id for _ in range(100)}
    assert len(ids) == 100
    assert {UUID(str(each)).version for each in ids} == {7}
