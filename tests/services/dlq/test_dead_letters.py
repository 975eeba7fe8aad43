"""A dead letter read back says what came, why and from where, whatever was in the record."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode, Lane
from services.dlq.dead_letters import LetterPlace, letter_of
from services.kafka.headers import Origin
from services.parsing.validation import said_by
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place
from tests.services.dlq.dead_letters import TOPIC, Message, put_aside, request

RECORD = Record(Place(Partition(TOPIC, 1), 7), Lane.STANDARD, b"k", b"v", (), 0)
NAMES = st.sampled_from(["mine", "loraq-error-code", "loraq-source-topic", "loraq-origin", "traceparent", ""])
HEADERS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=20)), max_size=6).map(tuple)


@given(st.none() | st.binary(max_size=20), st.binary(max_size=60), HEADERS, st.sampled_from(list(ErrorCode)))
def test_what_came_is_told_apart_from_what_loraq_added(key, value, headers, code) -> None:
    letter = put_aside(value, key=key, headers=headers, code=code, message="why")
    assert (letter.key, letter.value, letter.headers) == (key, value, headers)
    assert (letter.code, letter.message, letter.omitted_bytes) == (code, "why", None)
    assert letter.source == Origin(TOPIC, 1, 7, 1_600_000_000_000)
    assert letter.place == LetterPlace(2, 17)
    assert letter.put_aside_at.isoformat() == "2023-11-14T22:13:20.123000+00:00"


@given(st.text(max_size=30), st.integers(0, 9), st.integers(0, 2**63), st.integers(0, 2**48))
def test_an_origin_survives_its_header(topic: str, partition: int, offset: int, timestamp_ms: int) -> None:
    origin = Origin(topic.replace("/", ""), partition, offset, timestamp_ms)
    assert Origin.parsed(origin.encoded()) == origin


def test_a_value_that_was_too_large_is_told_by_its_size() -> None:
    letter = put_aside(b" " * 3_000_000)
    assert (letter.value, letter.omitted_bytes) == (b"", 3_000_000)


def test_a_record_that_loraq_did_not_put_there_has_neither_code_nor_source() -> None:
    letter = letter_of(Message(b"k", b"v", [("mine", b"x")]))
    assert (letter.code, letter.source, letter.headers) == (None, None, (("mine", b"x"),))
    assert letter.message == "it has no loraq-error-code header"


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("loraq-source-topic", None, "it has no loraq-source-topic header"),
        ("loraq-source-partition", b"-1", r"loraq-source-partition should be a number of at least 0 \(got '-1'\)"),
        ("loraq-source-offset", b"\xff", "loraq-source-offset should be a number"),
        ("loraq-source-timestamp", b"", "loraq-source-timestamp should be a number of at least -1"),
        ("loraq-value-omitted", b"much", r"loraq-value-omitted should be a number of at least 0 \(got 'much'\)"),
        ("loraq-value-omitted", b"9" * 5000, "loraq-value-omitted should be a number"),
    ],
)
def test_headers_that_loraq_would_not_have_written_make_a_letter_not_loraqs_and_name_the_header(
    name: str, content: bytes | None, wrong: str
) -> None:
    came = dead_letter(Rejection(RECORD, ErrorCode.INVALID_MESSAGE, "why"))
    headers = tuple({**dict(came.headers), name: content}.items())
    letter = letter_of(Message(came.key, came.value, headers))
    assert (letter.code, letter.source, letter.omitted_bytes, letter.headers) == (None, None, None, headers)
    assert re.search(wrong, letter.message)
    assert len(letter.message) < 200


@pytest.mark.parametrize(
    ("timestamp", "year"), [(-1, 1969), (2**62, 9999), (-(2**62), 1), (2**48 - 1, 9999), (1_700_000_000_123, 2023)]
)
def test_a_time_that_is_no_date_is_the_nearest_one(timestamp: int, year: int) -> None:
    assert letter_of(Message(b"k", b"v", [], timestamp=timestamp)).put_aside_at.year == year


def test_tenant_and_adapter_are_what_the_value_says_or_else_the_key() -> None:
    job_id = "01930000-0000-7000-8000-000000000000"
    assert said_by(b"other/x", request(adapter="tone@3", job_id=job_id)) == ("acme", "tone@3", job_id)
    assert said_by(b"acme/tone", b"\xff not json") == ("acme", "tone", None)
    assert said_by(b"acme/tone", b"[1]") == ("acme", "tone", None)
    assert said_by(b"no slash", b"{}") == said_by(None, None) == (None, None, None)
    assert said_by(None, b"[" * 100_000) == (None, None, None)
