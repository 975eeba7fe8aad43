"""One trace: the producer's span, the worker's, the engine's inside it, and the outbox rows that continue it."""

from opentelemetry.trace import SpanKind

from schemas.job import JobRequest, Sampling
from services.client.producer import JobProducer
from services.process import telemetry
from services.process.settings import Settings
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, open_world
from tests.spans import recorded_spans


async def test_the_producers_trace_continues_through_worker_and_engine_to_the_outbox(settings: Settings) -> None:
    request = JobRequest(tenant=TENANT, prompt="the rain in the north", sampling=Sampling(max_tokens=4))
    async with open_world(settings) as world:
        with recorded_spans() as spans:
            async with running_worker(settings), JobProducer.from_settings(settings) as producer:
                receipt = await producer.send(request)
                [row] = await world.ended(receipt.job_id)
            [outbox] = await world.rows("select traceparent from loraq.outbox")
            trace = {span.name: span for span in spans.of_trace(outbox["traceparent"])}  # all ended with the worker
    assert row["state"] == "succeeded"
    sent, processed = trace[f"send {receipt.topic}"], trace[f"process {receipt.topic}"]
    generated = trace["text_completion base"]
    assert (processed.kind, generated.kind) == (SpanKind.CONSUMER, SpanKind.INTERNAL)
    assert processed.parent is not None
    assert processed.parent.span_id == sent.context.span_id == processed.links[0].context.span_id
    assert generated.parent is not None
    assert generated.parent.span_id == processed.context.span_id
    assert outbox["traceparent"].split("-")[2] == f"{processed.context.span_id:016x}"
    assert processed.attributes is not None
    assert processed.attributes[telemetry.JOB_ID] == str(receipt.job_id)
    assert processed.attributes[telemetry.MESSAGING_KAFKA_OFFSET] == receipt.offset
    assert generated.attributes is not None
    assert generated.attributes[telemetry.GEN_AI_USAGE_OUTPUT_TOKENS] == 4
    assert [event.name for event in generated.events] == ["first token"]
    assert processed.start_time <= generated.start_time <= generated.end_time <= processed.end_time
