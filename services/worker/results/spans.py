"""The spans of a finished job: one from the record's arrival to its row, with the engine's span inside.

The engine process only records times; the spans are created here, with a start time in the past.
"""

import time

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from services.process import telemetry
from services.worker.engine.protocol import Finished
from services.worker.jobs import Job, Outcome


def open_process_span(outcome: Outcome) -> Span:
    """Start the record's span, a child of the producer's; end it once the row is committed."""
    job = outcome.job
    record = job.candidate.record
    parent = telemetry.context_from(job.candidate.traceparent)
    sender = trace.get_current_span(parent).get_span_context()
    span = telemetry.tracer().start_span(
        telemetry.process_span_name(record.place.partition.topic),
        context=parent,
        kind=SpanKind.CONSUMER,
        start_time=job.candidate.received_ns,
        links=[Link(sender)] if sender.is_valid else [],
        attributes=_record_attributes(job),
    )
    span.set_attribute(telemetry.JOB_STATE, str(outcome.state))
    if outcome.error is not None:
        span.set_attribute(telemetry.ERROR_TYPE, str(outcome.error.code))
        span.set_status(StatusCode.ERROR, outcome.error.message)
    if outcome.finished is not None:
        _engine_span(span, job, outcome.finished)
    return span


def traceparent_of(outcome: Outcome, span: Span | None) -> str | None:
    """W3C `traceparent` for the job's event and webhook: of its span, or the producer's if there is none."""
    if span is None:
        return telemetry.propagated(outcome.job.candidate.traceparent)
    with trace.use_span(span, end_on_exit=False):
        return telemetry.current_traceparent()


def close_process_span(span: Span) -> None:
    """End the span: the row is committed."""
    span.end(time.time_ns())


def _record_attributes(job: Job) -> dict[str, str | int]:
    record = job.candidate.record
    attributes: dict[str, str | int] = {
        telemetry.MESSAGING_SYSTEM: "kafka",
        telemetry.MESSAGING_OPERATION_NAME: "process",
        telemetry.MESSAGING_OPERATION_TYPE: "process",
        telemetry.MESSAGING_DESTINATION_NAME: record.place.partition.topic,
        telemetry.MESSAGING_DESTINATION_PARTITION_ID: str(record.place.partition.number),
        telemetry.MESSAGING_KAFKA_OFFSET: record.place.offset,
        telemetry.TENANT: job.key.tenant,
        telemetry.JOB_ID: str(job.key.job_id),
        telemetry.LANE: str(job.lane),
        telemetry.ATTEMPT: job.attempts,
    }
    if record.key is not None:
        attributes[telemetry.MESSAGING_KAFKA_MESSAGE_KEY] = record.key.decode("utf-8", "replace")
    if job.claim.adapter is not None:
        attributes[telemetry.ADAPTER] = job.claim.adapter.name
        attributes[telemetry.ADAPTER_VERSION] = job.claim.adapter.version
        attributes[telemetry.ADAPTER_DIGEST] = job.claim.adapter.digest
    return attributes


def _engine_span(parent: Span, job: Job, finished: Finished) -> None:
    operation = "chat" if job.request.messages is not None else "text_completion"
    model = job.request.adapter or "base"
    span = telemetry.tracer().start_span(
        telemetry.generate_span_name(operation, model),
        context=trace.set_span_in_context(parent),
        kind=SpanKind.INTERNAL,
        start_time=finished.added_ns,
        attributes={
            telemetry.GEN_AI_OPERATION_NAME: operation,
            telemetry.GEN_AI_PROVIDER_NAME: "loraq",
            telemetry.GEN_AI_REQUEST_MODEL: model,
            telemetry.GEN_AI_REQUEST_MAX_TOKENS: job.request.sampling.max_tokens,
            telemetry.GEN_AI_REQUEST_TEMPERATURE: job.request.sampling.temperature,
            telemetry.GEN_AI_RESPONSE_FINISH_REASONS: [finished.finish_reason],
            telemetry.GEN_AI_USAGE_INPUT_TOKENS: finished.prompt_tokens,
            telemetry.GEN_AI_USAGE_OUTPUT_TOKENS: finished.completion_tokens,
        },
    )
    if finished.first_token_s is not None:
        span.add_event("first token", timestamp=finished.added_ns + round(finished.first_token_s * 1e9))
    span.end(finished.finished_ns)
