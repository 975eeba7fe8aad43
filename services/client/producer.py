"""The Python producer of jobs. Any other Kafka client can do the same: see docs/clients.md.

async with JobProducer.from_settings(settings) as producer:
    receipt = await producer.send(JobRequest(tenant="acme", adapter="support-tone", prompt="…"))
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from opentelemetry.trace import SpanKind
from pydantic import ValidationError

from schemas.common import Lane
from schemas.control import Cancellation
from schemas.job import JobRequest
from services.client.identifiers import uuid7
from services.client.signing import SIGNATURE_HEADER, signature
from services.errors import InputError
from services.kafka import clients as kafka
from services.parsing.validation import sentence_of
from services.process import telemetry
from services.process.settings import Settings

MAX_IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where the broker stored the record of a job or a cancellation: from here on it is not lost."""

    job_id: UUID
    topic: str
    partition: int
    offset: int


def record_key(request: JobRequest) -> bytes | None:
    """`tenant/adapter` without version, so that one worker gets an adapter's jobs; None for the base model."""
    if request.adapter is None:
        return None
    return f"{request.tenant}/{request.adapter.split('@')[0]}".encode()


class JobProducer:
    """Validates and sends jobs: sets key and partition (murmur2), signs with a producer key, waits for the broker."""

    def __init__(self, settings: Settings, client: Any, producer_key: str | None = None) -> None:
        self._settings = settings
        self._client = client
        self._producer_key = producer_key.encode() if producer_key else None

    @classmethod
    @asynccontextmanager
    async def from_settings(cls, settings: Settings, producer_key: str | None = None) -> AsyncIterator["JobProducer"]:
        """A connected producer; raises RetryableError or ConfigError if it cannot connect.

        With a producer key (default: LORAQ_PRODUCER_KEY) every job is signed, so all must belong to that tenant.
        """
        client = kafka.producer(settings, client_id="loraq-producer")
        key = settings.producer_key
        try:
            with kafka.starting(settings):
                await client.start()
            yield cls(settings, client, producer_key or (key.get_secret_value() if key else None))
        finally:
            await client.stop()

    async def send(
        self, request: JobRequest, lane: Lane = Lane.STANDARD, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Receipt:
        """Produce one job and return once every in-sync replica has it.

        A request without job_id gets one; `headers` come before loraq's own. Raises InputError if the record is too
        large, and RetryableError without an acknowledgement: the broker may have stored the job nevertheless, so
        send it again under the same job_id.
        """
        request = with_job_id(request)
        topic = self._settings.jobs_topic(lane)
        value = request.model_dump_json(exclude_defaults=True).encode()
        with telemetry.tracer().start_as_current_span(
            telemetry.send_span_name(topic), kind=SpanKind.PRODUCER, attributes=_attributes(request, topic)
        ):
            assert request.job_id is not None
            return await self._send(topic, record_key(request), value, request.job_id, headers)

    async def cancel(self, tenant: str, job_id: UUID | str) -> Receipt:
        """Cancel a job, whether it is running, waiting or not yet consumed; a job that ends first keeps its outcome.

        Returns once every in-sync replica has the cancellation. Raises InputError if `tenant` cannot be a tenant's
        name or `job_id` is not a UUID, and RetryableError without an acknowledgement.
        """
        try:
            cancellation = Cancellation.model_validate_json(json.dumps({"tenant": tenant, "job_id": str(job_id)}))
        except ValidationError as error:
            raise InputError(sentence_of(error)) from error
        value = cancellation.model_dump_json().encode()
        return await self._send(self._settings.control_topic, tenant.encode(), value, cancellation.job_id)

    async def _send(
        self, topic: str, key: bytes | None, value: bytes, job_id: UUID, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Receipt:
        all_headers = [*headers, *self._headers(value)]
        with kafka.errors_translated(self._settings):
            sent = await self._client.send_and_wait(topic, value, key=key, headers=all_headers)
        telemetry.MESSAGES_SENT.labels(destination=topic).inc()
        return Receipt(job_id, sent.topic, sent.partition, sent.offset)

    async def send_all(self, requests: Sequence[JobRequest], lane: Lane = Lane.STANDARD) -> list[Receipt]:
        """Produce many jobs, at most MAX_IN_FLIGHT at a time; receipts are in the order of the requests."""
        receipts: list[Receipt] = []
        for start in range(0, len(requests), MAX_IN_FLIGHT):
            batch = requests[start : start + MAX_IN_FLIGHT]
            receipts += await asyncio.gather(*(self.send(request, lane) for request in batch))
        return receipts

    def _headers(self, value: bytes) -> list[tuple[str, bytes]]:
        headers: list[tuple[str, bytes]] = []
        if (traceparent := telemetry.current_traceparent()) is not None:
            headers.append((telemetry.TRACEPARENT_HEADER, traceparent.encode()))
        if self._producer_key is not None:
            headers.append((SIGNATURE_HEADER, signature(self._producer_key, value).encode()))
        return headers


def with_job_id(request: JobRequest) -> JobRequest:
    """The request itself, or a copy with a new UUIDv7 if it has no job_id."""
    return request if request.job_id is not None else request.model_copy(update={"job_id": uuid7()})


def _attributes(request: JobRequest, topic: str) -> dict[str, str]:
    attributes = {
        telemetry.MESSAGING_SYSTEM: "kafka",
        telemetry.MESSAGING_OPERATION_NAME: "send",
        telemetry.MESSAGING_OPERATION_TYPE: "send",
        telemetry.MESSAGING_DESTINATION_NAME: topic,
        telemetry.TENANT: request.tenant,
        telemetry.JOB_ID: str(request.job_id),
    }
    key = record_key(request)
    return attributes | ({telemetry.MESSAGING_KAFKA_MESSAGE_KEY: key.decode()} if key else {})
