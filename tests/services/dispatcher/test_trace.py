"""The producer's trace continues in the webhook and in the event."""

from opentelemetry.trace import SpanKind, StatusCode

from services.process import telemetry
from services.webhooks.receiver import WebhookReceiver
from tests.services.dispatcher.conftest import World, dispatching
from tests.spans import recorded_spans
from tests.waiting import eventually


async def test_the_producers_trace_continues_in_webhook_and_event(world: World) -> None:
    topic = telemetry.send_span_name(world.settings.events_topic)
    with recorded_spans() as spans:
        with telemetry.tracer().start_as_current_span(telemetry.SPAN_CREATE_JOB) as creating:
            traceparent = telemetry.current_traceparent()
        assert traceparent is not None
        async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
            event_id = await world.add("webhook", receiver.url, traceparent=traceparent)
            await world.add("event", traceparent=traceparent)
            [received] = await receiver.wait_for(1)
            await eventually(
                lambda: spans.named(telemetry.SPAN_SEND_WEBHOOK) and spans.named(topic), what="both spans to end"
            )
        [webhook] = spans.named(telemetry.SPAN_SEND_WEBHOOK)
        [event] = spans.named(topic)
        assert {span.name for span in spans.of_trace(traceparent)} == {creating.name, webhook.name, event.name}
    parent = creating.get_span_context().span_id
    assert webhook.parent is not None
    assert event.parent is not None
    assert (webhook.parent.span_id, event.parent.span_id) == (parent, parent)
    assert (webhook.kind, event.kind) == (SpanKind.CLIENT, SpanKind.PRODUCER)
    assert received.headers["traceparent"].split("-")[2] == f"{webhook.context.span_id:016x}"
    assert webhook.attributes is not None
    assert webhook.attributes[telemetry.EVENT_ID] == str(event_id)
    assert webhook.attributes[telemetry.HTTP_RESPONSE_STATUS_CODE] == 204


async def test_a_failed_attempt_is_an_error_span(world: World) -> None:
    with recorded_spans() as spans:
        async with WebhookReceiver(world.secret, respond=lambda _: 410) as receiver, dispatching(world.settings):
            await world.add_webhook(receiver.url)
            [span] = await eventually(lambda: spans.named(telemetry.SPAN_SEND_WEBHOOK), what="the span")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes[telemetry.OUTCOME] == "failed"
