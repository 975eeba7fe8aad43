"""What a record becomes in the dead-letter topic, whatever it was."""

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
    """A dead-letter topic that refuses some values, or all."""

    too_large: bytes | None = None
    is_away: bool = False
    attempts: int = 0
    taken: list[bytes] = field(default_factory=list)

    async def send_and_wait(self, _topic: str, value: bytes, **_more: object) -> None:
        self.attempts += 1
        if self.is_away:
            raise KafkaConnectionError("gone")
        if value == self.too_large:
            raise MessageSizeTooLargeError("big")
        self.taken.append(value)


@asynccontextmanager
async def sending(topic: Topic, monkeypatch: pytest.MonkeyPatch, retry_s: float) -> AsyncIterator[DeadLetters]:
    monkeypatch.setattr(dead_letters, "RETRY_DELAYS_S", (retry_s,))
    ledger = Ledger()
    ledger.assign([Partition("jobs", 1)])
    letters = DeadLetters(Settings(_env_file=None), ledger, Health(), lambda _: None)
    task = asyncio.create_task(letters.run(topic))
    yield letters
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_letter_that_its_topic_will_never_take_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = Topic(too_large=b"large")
    async with sending(topic, monkeypatch, retry_s=3600.0) as letters:
        letters.put(rejection(0, b"large"))
        await eventually(lambda: topic.attempts == 1)
        for number in range(1, 4):
            letters.put(rejection(number, b"%d" % number))
            await eventually(lambda: len(topic.taken) == number, 5.0)  # noqa: B023  # awaited inside the turn
        assert (len(letters), topic.attempts) == (1, 4)


async def test_a_topic_that_is_away_is_not_asked_for_each_letter_and_gets_all_of_them_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic(is_away=True)
    async with sending(topic, monkeypatch, retry_s=0.05) as letters:
        letters.put(rejection(0, b"0"))
        await eventually(lambda: topic.attempts >= 1)
        seen = topic.attempts
        for number in range(1, 250):
            letters.put(rejection(number, b"%d" % number))
        assert topic.attempts - seen <= 1
        topic.is_away = False
        await eventually(lambda: len(topic.taken) == 250, 5.0)
        assert sorted(topic.taken) == sorted(b"%d" % number for number in range(250))
        assert len(letters) == 0


SIZES = st.sampled_from([0, 1, 70_000, MAX_DEAD_RECORD_BYTES - 20_000, MAX_DEAD_RECORD_BYTES, 5_000_000])


def letter(key: bytes | None, value: bytes | None, headers: Headers = (), message: str = "why") -> DeadLetter:
    record = Record(Place(Partition("jobs", 1), 7), Lane.BATCH, key, value, headers, 0)
    return dead_letter(Rejection(record, ErrorCode.INVALID_MESSAGE, message))


def test_a_record_is_kept_as_it_came() -> None:
    kept = letter(b"k", b"\xff{", (("mine", None),))
    assert (kept.key, kept.value, kept.headers[0]) == (b"k", b"\xff{", ("mine", None))
    assert letter(b"k", None).value is None


def test_a_record_without_key_and_value_is_one_that_a_client_will_send() -> None:
    assert letter(None, None)[:2] == (None, b"")


def test_of_a_record_that_the_topic_cannot_take_its_length_and_digest_are_kept() -> None:
    value = b" " * 3_000_000
    kept = letter(b"k", value, (("mine", b"x"),))
    headers = dict(kept.headers)
    assert (kept.key, kept.value) == (b"k", b"")
    assert headers["loraq-value-omitted"] == b"3000000"
    assert headers["loraq-value-sha256"] == hashlib.sha256(value).hexdigest().encode()
    assert headers["loraq-source-offset"] == b"7"


@given(SIZES, SIZES, SIZES, st.integers(0, 20_000), st.sampled_from(["why", "w" * 10 * MAX_MESSAGE_BYTES]))
def test_every_dead_letter_fits_its_topic(key: int, value: int, header: int, count: int, message: str) -> None:
    kept = letter(b"k" * key, b"v" * value, (("h", b"x" * header), *[("h", b"x" * 60)] * count), message)
    headers = sum(len(name) + len(content or b"") + MAX_HEADER_OVERHEAD_BYTES for name, content in kept.headers)
    assert len(kept.key or b"") + len(kept.value or b"") + headers < MAX_DEAD_RECORD_BYTES
