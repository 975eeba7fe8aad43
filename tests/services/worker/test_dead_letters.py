"""What a record becomes in the dead-letter topic, whatever it was."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode, Lane
from services.kafka import MAX_DEAD_RECORD_BYTES
from services.worker.dead_letters import BYTES_PER_HEADER, MAX_MESSAGE_BYTES, DeadLetter, dead_letter
from services.worker.jobs import Headers, Record, Rejection
from services.worker.ledger import Partition, Place

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
    headers = sum(len(name) + len(content or b"") + BYTES_PER_HEADER for name, content in kept.headers)
    assert len(kept.key or b"") + len(kept.value or b"") + headers < MAX_DEAD_RECORD_BYTES
