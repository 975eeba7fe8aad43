"""Records are dead-lettered for any content and through any failure of the topic."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiokafka.errors import KafkaConnectionError, MessageSizeTooLargeError
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode, Lane
from services.kafka.clients import MAX_DEAD_RECORD_BYTES
from services.process.lifecycle import Health
from services.process.settings import Settings
from services.worker.intake import dead_letters
from services.worker.intake.dead_letters import (
    MAX_HEADER_OVERHEAD_BYTES,
    MAX_MESSAGE_BYTES,
    DeadLetter,
    DeadLetters,
    dead_letter,
)
from services.worker.jobs import Headers, Record, Rejection
from services.worker.offsets.ledger import Ledger, Partition, Place
from tests.waiting import eventually


def rejection(offset: int, value: bytes = b"x") -> Rejection:
    record = Record(Place(Partition("jobs", 1), offset), Lane.BATCH, None, value, (), 0)
    return Rejection(record, ErrorCode.INVALID_MESSAGE, "why")


@dataclass
class Topic:
    """A dead-dead_lettered topic that refuses a value or is unreachable."""

    too_large: bytes | None = None
    is_unreachable: bool = False
    attempts: int = 0
    accepted: list[bytes] = field(default_factory=list)

    async def send_and_wait(self, _topic: str, value: bytes, **_more: object) -> None:
        self.attempts += 1
        if self.is_unreachable:
            raise KafkaConnectionError("gone")
        if value == self.too_large:
            raise MessageSizeTooLargeError("big")
        self.accepted.append(value)


@asynccontextmanager
async def sending(topic: Topic, monkeypatch: pytest.MonkeyPatch, retry_s: float) -> AsyncIterator[DeadLetters]:
    monkeypatch.setattr(dead_letters, "RETRY_DELAYS_S", (retry_s,))
    ledger = Ledger()
    ledger.assign([Partition("jobs", 1)])
    queue = DeadLetters(Settings(_env_file=None), ledger, Health(), lambda _: None)
    task = asyncio.create_task(queue.run(topic))
    yield queue
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_that_the_topic_always_refuses_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic(too_large=b"large")
    async with sending(topic, monkeypatch, retry_s=3600.0) as queue:
        queue.put(rejection(0, b"large"))
        await eventually(lambda: topic.attempts == 1)
        for number in range(1, 4):
            queue.put(rejection(number, b"%d" % number))
            await eventually(lambda: len(topic.accepted) == number, 5.0)  # noqa: B023  # awaited inside the turn
        assert (len(queue), topic.attempts) == (1, 4)


async def test_an_unreachable_topic_is_not_tried_per_record_and_gets_all_records_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic(is_unreachable=True)
    async with sending(topic, monkeypatch, retry_s=0.05) as queue:
        queue.put(rejection(0, b"0"))
        await eventually(lambda: topic.attempts >= 1)
        before = topic.attempts
        for number in range(1, 250):
            queue.put(rejection(number, b"%d" % number))
        assert topic.attempts - before <= 1
        topic.is_unreachable = False
        await eventually(lambda: len(topic.accepted) == 250, 5.0)
        assert sorted(topic.accepted) == sorted(b"%d" % number for number in range(250))
        assert len(queue) == 0


SIZES = st.sampled_from([0, 1, 70_000, MAX_DEAD_RECORD_BYTES - 20_000, MAX_DEAD_RECORD_BYTES, 5_000_000])


def dead_lettered(key: bytes | None, value: bytes | None, headers: Headers = (), message: str = "why") -> DeadLetter:
    record = Record(Place(Partition("jobs", 1), 7), Lane.BATCH, key, value, headers, 0)
    return dead_letter(Rejection(record, ErrorCode.INVALID_MESSAGE, message))


def test_a_dead_letter_keeps_the_record_unchanged() -> None:
    record = dead_lettered(b"k", b"\xff{", (("mine", None),))
    assert (record.key, record.value, record.headers[0]) == (b"k", b"\xff{", ("mine", None))
    assert dead_lettered(b"k", None).value is None


def test_a_record_without_key_and_value_gets_an_empty_value() -> None:
    assert dead_lettered(None, None)[:2] == (None, b"")


def test_a_record_too_large_for_the_topic_is_replaced_by_its_length_and_digest() -> None:
    value = b" " * 3_000_000
    record = dead_lettered(b"k", value, (("mine", b"x"),))
    headers = dict(record.headers)
    assert (record.key, record.value) == (b"k", b"")
    assert headers["loraq-value-omitted"] == b"3000000"
    assert headers["loraq-value-sha256"] == hashlib.sha256(value).hexdigest().encode()
    assert headers["loraq-source-offset"] == b"7"


@given(SIZES, SIZES, SIZES, st.integers(0, 20_000), st.sampled_from(["why", "w" * 10 * MAX_MESSAGE_BYTES]))
def test_every_dead_letter_fits_the_topic(key: int, value: int, header: int, count: int, message: str) -> None:
    record = dead_lettered(b"k" * key, b"v" * value, (("h", b"x" * header), *[("h", b"x" * 60)] * count), message)
    headers = sum(len(name) + len(content or b"") + MAX_HEADER_OVERHEAD_BYTES for name, content in record.headers)
    assert len(record.key or b"") + len(record.value or b"") + headers < MAX_DEAD_RECORD_BYTES
