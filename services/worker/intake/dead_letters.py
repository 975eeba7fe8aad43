"""Sends records that cannot become jobs to the dead-letter topic, unchanged, before their offsets are committed."""

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aiokafka.errors import KafkaError

from services.errors import InputError, ServiceError
from services.kafka import clients as kafka
from services.kafka import headers as names
from services.kafka.clients import MAX_DEAD_RECORD_BYTES
from services.process import telemetry
from services.process.lifecycle import Health
from services.process.settings import Settings
from services.worker.jobs import Headers, Record, Rejection
from services.worker.offsets.ledger import Ledger

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
MAX_BATCH = 100
MAX_MESSAGE_BYTES = 8 * 1024
MAX_KEY_BYTES = 64 * 1024
MAX_HEADER_OVERHEAD_BYTES = 20
"""An upper bound on what the protocol adds to each header."""
REASON_HEADERS_BYTES = 2 * MAX_MESSAGE_BYTES
_log = telemetry.get_logger()


class DeadLetter(NamedTuple):
    """A record for the dead-letter topic."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def dead_letter(rejection: Rejection) -> DeadLetter:
    """The record as received, with the reason in its headers.

    A record that was compressed may exceed the topic's limit: then its value and headers are omitted, and headers give
    the value's length and SHA-256. A record without key and value, which Kafka clients refuse to send, gets an empty
    value.
    """
    record = rejection.record
    if _num_bytes(record) > MAX_DEAD_RECORD_BYTES - REASON_HEADERS_BYTES:
        value = record.value or b""
        omitted: Headers = (
            (names.VALUE_OMITTED, str(len(value)).encode()),
            (names.VALUE_SHA256, hashlib.sha256(value).hexdigest().encode()),
        )
        key = record.key if len(record.key or b"") <= MAX_KEY_BYTES else None
        return DeadLetter(key, b"", [*reason_headers(rejection), *omitted])
    value_or_empty = b"" if record.value is None and record.key is None else record.value
    return DeadLetter(record.key, value_or_empty, [*record.headers, *reason_headers(rejection)])


def _num_bytes(record: Record) -> int:
    headers = sum(len(name.encode()) + len(value or b"") + MAX_HEADER_OVERHEAD_BYTES for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def reason_headers(rejection: Rejection) -> Headers:
    """Headers with the reason and the source of a dead letter."""
    record = rejection.record
    return (
        (names.ERROR_CODE, rejection.code.encode()),
        (names.ERROR_MESSAGE, rejection.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]),
        (names.SOURCE_TOPIC, record.place.partition.topic.encode()),
        (names.SOURCE_PARTITION, str(record.place.partition.number).encode()),
        (names.SOURCE_OFFSET, str(record.place.offset).encode()),
        (names.SOURCE_TIMESTAMP, str(record.timestamp_ms).encode()),
    )


class DeadLetters:
    """Queue of records to dead-letter. While the broker refuses them, offsets are not committed and an alarm is raised.

    Dead letters are sent in batches, so that a flood of invalid records costs other tenants only memory, and a refused
    one does not block the others.
    """

    def __init__(
        self, settings: Settings, ledger: Ledger, health: Health, observe: Callable[[Rejection], None]
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._health = health
        self._observe = observe
        self._reason = ""
        self._refused: list[Rejection] = []
        self._retry_at = 0.0
        self._num_refusals = 0
        self._is_blocked = False
        self._queue: deque[Rejection] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue) + len(self._refused)

    def put(self, rejection: Rejection) -> None:
        """Queue a rejection; bounded by the ledger's unfinished records."""
        record = rejection.record
        _log.warning(
            "Record rejected",
            action="record_rejected",
            code=str(rejection.code),
            reason=rejection.message,
            topic=record.place.partition.topic,
            partition=record.place.partition.number,
            offset=record.place.offset,
        )
        self._observe(rejection)
        self._queue.append(rejection)
        self._wake.set()

    async def run(self, producer: Any) -> None:
        """Send queued rejections until cancelled."""
        while True:
            await self._wait()
            now = time.monotonic()
            due, self._refused = (self._refused, []) if now >= self._retry_at else ([], self._refused)
            new = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._settle(await self._send(producer, [*due, *new]))

    async def _wait(self) -> None:
        """Wait for something to send. After a batch that was refused completely, new rejections wait as well."""
        while self._refused and (left_s := self._retry_at - time.monotonic()) > 0:
            if self._is_blocked:
                await asyncio.sleep(left_s)
            elif await self._wait_for_new(left_s):
                return
        if not self._refused:
            await self._wait_for_new(None)

    async def _wait_for_new(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` for a new rejection; returns whether there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._queue:
                    self._wake.clear()
                    await self._wake.wait()
        return bool(self._queue)

    async def _send(self, producer: Any, batch: Sequence[Rejection]) -> list[tuple[Rejection, ServiceError]]:
        """Send a batch and finish the records that every in-sync replica has; returns the others with their errors."""
        answers = await asyncio.gather(*(self._send_one(producer, each) for each in batch), return_exceptions=True)
        refused: list[tuple[Rejection, ServiceError]] = []
        for rejection, error in zip(batch, answers, strict=True):
            if error is None:
                telemetry.RECORDS_DEAD.labels(reason=str(rejection.code)).inc()
                self._ledger.finish(rejection.record.place)
            elif isinstance(error, KafkaError | OSError):
                refused.append((rejection, kafka.translated(error, self._settings)))
            else:
                raise error
        self._is_blocked = len(refused) == len(batch) and not all(isinstance(error, InputError) for _, error in refused)
        return refused

    def _settle(self, refused: list[tuple[Rejection, ServiceError]]) -> None:
        """Schedule refused records for a retry; a record that causes its own refusal does not block others."""
        self._refused += [rejection for rejection, _ in refused]
        self._num_refusals = self._num_refusals + 1 if refused else 0
        if refused:
            self._reason = str(refused[0][1])
            self._retry_at = time.monotonic() + RETRY_DELAYS_S[min(self._num_refusals, len(RETRY_DELAYS_S)) - 1]
            self._alarm(len(refused))
        self._health.set("dead letters", self._reason if self._refused else None)

    async def _send_one(self, producer: Any, rejection: Rejection) -> None:
        record = dead_letter(rejection)
        await producer.send_and_wait(self._settings.dead_topic, record.value, key=record.key, headers=record.headers)

    def _alarm(self, num_refused: int) -> None:
        telemetry.alarm(
            _log,
            "The dead-letter topic refuses records",
            action="dead_letter_failed",
            topic=self._settings.dead_topic,
            records=num_refused,
            reason=self._reason,
        )
