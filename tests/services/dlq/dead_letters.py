"""Dead letters as the worker writes them and as the library hands them out."""

import json
from dataclasses import dataclass
from typing import Any

from schemas.common import ErrorCode, Lane
from services.dlq.dead_letters import Letter, letter_of
from services.kafka.headers import RawHeaders
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place

TOPIC = "loraq.default.jobs.standard"


@dataclass(frozen=True)
class Message:
    """What the Kafka library hands out, as far as it is read."""

    key: bytes | None
    value: bytes | None
    headers: Any
    partition: int = 2
    offset: int = 17
    timestamp: int = 1_700_000_000_123


def put_aside(
    value: bytes | None,
    *,
    key: bytes | None = b"acme/tone",
    headers: RawHeaders = (),
    code: ErrorCode = ErrorCode.INVALID_MESSAGE,
    message: str = "field 'colour' is not known",
    offset: int = 7,
) -> Letter:
    """The letter that a record becomes, written and read back."""
    record = Record(Place(Partition(TOPIC, 1), offset), Lane.STANDARD, key, value, headers, 1_600_000_000_000)
    return read_back(Rejection(record, code, message))


def read_back(rejection: Rejection) -> Letter:
    return letter_of(Message(*dead_letter(rejection)))


def request(**fields: Any) -> bytes:
    return json.dumps({"tenant": "acme", "prompt": "hello"} | fields).encode()
