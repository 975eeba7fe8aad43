"""The control topic: every worker reads all of it, from the earliest record, and stores cancellations."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from aiokafka.errors import KafkaError
from pydantic import ValidationError

from schemas.control import Cancellation
from services.client.signing import SIGNATURE_HEADER, signature
from services.kafka import clients as kafka
from services.kafka import header_names
from services.kafka.topic_ids import KnownTopics, topic_ids
from services.parsing.validation import sentence_of
from services.process import telemetry
from services.process.settings import Settings
from services.worker.intake.records import TenantKey, damaged_key
from services.worker.jobs import JobKey
from services.worker.store.cancellations import CancellationStore
from services.worker.store.persistence import Persistence

POLL_MS = 1000
WATCH_TOPIC_S = 1.0
RETRY_S = 5.0
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a control record is skipped."""

    reason: str


def parse(value: bytes | None) -> Cancellation | Refusal:
    """Parse the value of a control record."""
    if value is None:
        return Refusal("the record has no value; a cancellation is a JSON object")
    try:
        return Cancellation.model_validate_json(value)
    except ValidationError as error:
        return Refusal(sentence_of(error))


def authorize(cancellation: Cancellation, message: Any, known: TenantKey | None, *, signed: bool) -> Refusal | None:
    """Why the record is not authorized to cancel jobs of its tenant; None if it is."""
    tenant = cancellation.tenant
    if known is None:
        return Refusal(f"no tenant {tenant!r} is registered")
    if not signed:
        return None
    sent = next((value for name, value in reversed(message.headers) if name == SIGNATURE_HEADER), None)
    if sent is None:
        return Refusal(f"the record has no {SIGNATURE_HEADER} header, which this pool requires")
    if known.key is None:
        return Refusal(damaged_key(tenant))
    expected = signature(known.key, message.value).encode()
    if hmac.compare_digest(sent.lower(), expected):
        return None
    return Refusal(f"the {SIGNATURE_HEADER} header does not match the producer key of tenant {tenant!r}")


class ControlReader:
    """A consumer without a group, so that every worker reads every record. `keys` looks up producer keys."""

    def __init__(
        self,
        settings: Settings,
        store: CancellationStore,
        persistence: Persistence,
        keys: Callable[[set[str]], Awaitable[dict[str, TenantKey]]],
        on_cancellation: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._persistence = persistence
        self._keys = keys
        self._on_cancellation = on_cancellation
        self._keep_ms = timedelta(days=settings.cancellation_retention_days) / timedelta(milliseconds=1)

    async def run(self) -> None:
        """Read until cancelled; after a failure, read again from the earliest record: cancelling is idempotent."""
        while True:
            try:
                await self._read()
            except UnicodeDecodeError as error:
                header_names.tolerate()
                _log.warning("A header's name is not UTF-8", action="header_name_mended", reason=str(error))
            except (KafkaError, OSError) as error:
                reason = str(kafka.translated(error, self._settings))
                telemetry.alarm(_log, "Cancellations cannot be read", action="control_failed", reason=reason)
            await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        consumer = kafka.control_consumer(self._settings)
        known, check_at = KnownTopics(), 0.0
        try:
            await consumer.start()
            while True:
                if time.monotonic() >= check_at:
                    await self._check_topic(consumer, known)
                    check_at = time.monotonic() + WATCH_TOPIC_S
                for messages in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                    await self._apply(messages)
        finally:
            await consumer.stop()

    async def _check_topic(self, consumer: Any, known: KnownTopics) -> None:
        """Read the topic from its beginning if it was deleted and recreated."""
        topic = self._settings.control_topic
        if known.recreated(await topic_ids(consumer, [topic])):
            telemetry.alarm(
                _log,
                "A topic was deleted and recreated; reading it from the beginning",
                action="topic_recreated",
                topics=[topic],
            )
            await consumer.seek_to_beginning()

    async def _apply(self, messages: Sequence[Any]) -> None:
        oldest_ms = time.time() * 1000 - self._keep_ms
        parsed = [(message, parse(message.value)) for message in messages if message.timestamp >= oldest_ms]
        requested = [(message, each) for message, each in parsed if isinstance(each, Cancellation)]
        for message, each in parsed:
            if isinstance(each, Refusal):
                _log_refusal(message, each)
        if not requested:
            return
        tenants = await self._persistence.retry_until_done(partial(self._keys, {each.tenant for _, each in requested}))
        keys: set[JobKey] = set()
        for message, each in requested:
            signed = self._settings.require_signed_jobs
            refusal = authorize(each, message, tenants.get(each.tenant), signed=signed)
            if refusal is None:
                keys.add(JobKey(each.tenant, each.job_id))
            else:
                _log_refusal(message, refusal)
        if keys:
            await self._persistence.retry_until_done(partial(self._store.cancel, sorted(keys)))
            self._on_cancellation()


def _log_refusal(message: Any, refusal: Refusal) -> None:
    telemetry.CONTROL_REFUSED.inc()
    _log.warning("Control record refused", action="control_refused", offset=message.offset, reason=refusal.reason)
