"""Records that no job can be made of go to the dead-letter topic as they came; only then do their offsets move."""

import asyncio
from collections import deque
from typing import Any

from aiokafka.errors import KafkaError

from services import kafka, telemetry
from services.settings import Settings
from services.worker.jobs import Headers, Rejection
from services.worker.ledger import Ledger

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
MAX_MESSAGE_BYTES = 8 * 1024
_log = telemetry.get_logger()


def dead_headers(rejection: Rejection) -> list[tuple[str, bytes | None]]:
    """The record's own headers, then why and from where it was put aside."""
    record = rejection.record
    added: Headers = (
        ("loraq-error-code", rejection.code.encode()),
        ("loraq-error-message", rejection.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES]),
        ("loraq-source-topic", record.place.partition.topic.encode()),
        ("loraq-source-partition", str(record.place.partition.number).encode()),
        ("loraq-source-offset", str(record.place.offset).encode()),
    )
    return [*record.headers, *added]


class DeadLetters:
    """Queue in front of the dead-letter topic. While the broker refuses, offsets stand still and an alarm is raised."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._queue: deque[Rejection] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, rejection: Rejection) -> None:
        """Queue a rejection; bounded by the records that the ledger holds."""
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
        self._queue.append(rejection)
        self._wake.set()

    async def run(self, producer: Any) -> None:
        """Send what is queued, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._send(producer, self._queue[0])
                self._queue.popleft()

    async def _send(self, producer: Any, rejection: Rejection) -> None:
        attempt = 0
        while not await self._sent(producer, rejection):
            await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
            attempt += 1
        telemetry.RECORDS_DEAD.labels(reason=str(rejection.code)).inc()
        self._ledger.finish(rejection.record.place)

    async def _sent(self, producer: Any, rejection: Rejection) -> bool:
        record, topic = rejection.record, self._settings.dead_topic
        try:
            await producer.send_and_wait(topic, record.value, key=record.key, headers=dead_headers(rejection))
        except (KafkaError, OSError) as error:
            reason = str(kafka.translated(error, self._settings))
            telemetry.alarm(_log, "Dead-letter topic refuses", action="dead_letter_failed", topic=topic, reason=reason)
            return False
        return True
