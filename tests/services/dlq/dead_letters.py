"""Dead letters as the worker writes them and the Kafka library returns them."""

import json
from dataclasses import dataclass
from typing import Any

from schemas.common import ErrorCode, Lane
from services.dlq.dead_letters import DeadLetter, dead_letter_of
from services.kafka.headers import RawHeaders
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place

TOPIC = "loraq.default.jobs.standard"


@dataclass(frozen=True)
class Message:
    """The fields of the Kafka library's message that are used."""

    key: bytes | None
    value: bytes | None
    headers: Any
    partition: int = 2
    offset: int = 17
    timestamp: int = 1_700_000_000_123


def dead_lettered(
    value: bytes | None,
    *,
    key: bytes | None = b"acme/tone",
    headers: RawHeaders = (),
    code: ErrorCode = ErrorCode.INVALID_MESSAGE,
    message: str = "field 'colour' is not known",
    offset: int = 7,
) -> DeadLetter:
    """The dead letter of a record, written by the worker and read back."""
    record = Record(Place(Partition(TOPIC, 1), offset), Lane.STANDARD, key, value, headers, 1_600_000_000_000)
    return read_back(Rejection(record, code, message))


def read_back(rejection: Rejection) -> DeadLetter:
    return dead_letter_of(Message(*dead_letter(rejection)))


def request(**fields: Any) -> bytes:
    return json.dumps({"tenant": "acme", "prompt": "hello"} | fields).encode()
