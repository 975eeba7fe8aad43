"""Sends due events to Kafka in batches, and marks each done once the broker has acknowledged it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from aiokafka.errors import KafkaError
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.dispatcher.outbox import EventRow, Outbox
from services.dispatcher.wakeup import first_of
from services.errors import ConfigError, MissingTopicError, PermanentError, RetryableError, ServiceError
from services.kafka import clients as kafka
from services.kafka.reading import require_topics
from services.process import telemetry
from services.process.lifecycle import Health
from services.process.settings import Settings

MAX_CLAIM = 200
CLAIM_FOR = timedelta(seconds=60)
RETRY_AFTER = timedelta(seconds=2)
RECONNECT_AFTER_S = 2.0
CONTENT_TYPE = b"application/cloudevents+json; charset=UTF-8"
_log = telemetry.get_logger()


class EventLoop:
    """Runs until stopped. Setting `wake` makes it look for due events now."""

    def __init__(self, outbox: Outbox, settings: Settings) -> None:
        self.wake = asyncio.Event()
        self._outbox = outbox
        self._settings = settings
        self._topic = settings.events_topic

    async def run(self, stop: asyncio.Event, health: Health) -> None:
        """Send until `stop`. A producer that failed is replaced, because it may never recover.

        If Kafka refuses the connection, the process reports itself not ready until the operator fixes the settings;
        webhooks are still sent. Raises MissingTopicError if Kafka has no events topic at the first connection:
        the pool in the settings is probably mistyped, and a broker may create topics on first use.
        """
        topic_exists = False
        while not stop.is_set():
            try:
                if not topic_exists:
                    await require_topics(self._settings, [self._topic])
                    topic_exists = True
                async with self._producer() as producer:
                    health.set("events", None)
                    await self._send_until(stop, producer)
            except MissingTopicError:
                raise
            except (RetryableError, ConfigError) as error:
                health.set("events", str(error))
                _log.warning("Events held up", action="events_held_up", reason=str(error))
                await first_of(stop, timeout_s=RECONNECT_AFTER_S)

    @asynccontextmanager
    async def _producer(self) -> AsyncIterator[Any]:
        producer = kafka.producer(self._settings, client_id="loraq-dispatcher")
        try:
            with kafka.starting(self._settings):
                await producer.start()
            yield producer
        except (KafkaError, OSError) as error:
            raise kafka.translated(error, self._settings) from error
        finally:
            await producer.stop()

    async def _send_until(self, stop: asyncio.Event, producer: Any) -> None:
        while not stop.is_set():
            self.wake.clear()
            rows = await self._outbox.claim_events(MAX_CLAIM, CLAIM_FOR)
            if rows:
                await self._send(producer, rows)
            else:
                await first_of(stop, self.wake, timeout_s=self._settings.poll_interval_s)

    async def _send(self, producer: Any, rows: list[EventRow]) -> None:
        """Send all, then record each by its own acknowledgement; raises RetryableError if the broker failed one."""
        errors = await asyncio.gather(*(self._send_one(producer, row) for row in rows))
        by_error = list(zip(rows, errors, strict=True))
        dead = [row.id for row, error in by_error if _is_permanent(error)]
        failed = [error for error in errors if error is not None and not _is_permanent(error)]
        await self._outbox.finish_events([row.id for row, error in by_error if error is None], "done")
        await self._outbox.finish_events(dead, "dead")
        await self._outbox.postpone_events(
            [row.id for row, error in by_error if error is not None and not _is_permanent(error)], RETRY_AFTER
        )
        if failed:
            raise failed[0]

    async def _send_one(self, producer: Any, row: EventRow) -> ServiceError | None:
        with telemetry.tracer().start_as_current_span(
            telemetry.send_span_name(self._topic),
            context=telemetry.context_from(row.traceparent),
            kind=SpanKind.PRODUCER,
            attributes=self._attributes(row),
        ) as span:
            try:
                sent = await producer.send_and_wait(
                    self._topic, row.body.encode(), key=str(row.job_id).encode(), headers=_headers()
                )
            except (KafkaError, OSError) as error:
                reason = kafka.translated(error, self._settings)
                span.set_status(Status(StatusCode.ERROR, str(reason)))
                if _is_permanent(reason):
                    telemetry.alarm(
                        _log, "Event refused", action="event_dead", event_id=str(row.event_id), reason=str(reason)
                    )
                return reason
            span.set_attribute(telemetry.MESSAGING_DESTINATION_PARTITION_ID, str(sent.partition))
            span.set_attribute(telemetry.MESSAGING_KAFKA_OFFSET, sent.offset)
        telemetry.MESSAGES_SENT.labels(destination=self._topic).inc()
        return None

    def _attributes(self, row: EventRow) -> dict[str, str]:
        return {
            telemetry.MESSAGING_SYSTEM: "kafka",
            telemetry.MESSAGING_OPERATION_NAME: "send",
            telemetry.MESSAGING_OPERATION_TYPE: "send",
            telemetry.MESSAGING_DESTINATION_NAME: self._topic,
            telemetry.MESSAGING_KAFKA_MESSAGE_KEY: str(row.job_id),
            telemetry.EVENT_ID: str(row.event_id),
            telemetry.TENANT: row.tenant,
            telemetry.JOB_ID: str(row.job_id),
        }


def _is_permanent(error: ServiceError | None) -> bool:
    """Whether the broker will reject this event at every attempt. Wrong credentials are not the event's fault."""
    return isinstance(error, PermanentError) and not isinstance(error, ConfigError)


def _headers() -> list[tuple[str, bytes]]:
    headers = [("content-type", CONTENT_TYPE)]
    if traceparent := telemetry.current_traceparent():
        headers.append((telemetry.TRACEPARENT_HEADER, traceparent.encode()))
    return headers
