"""A dead letter read back has the original record, the reason and the source, for any content."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.common import ErrorCode, Lane
from services.dlq.dead_letters import DeadLetterPosition, dead_letter_of
from services.kafka.headers import Origin
from services.parsing.validation import stated_identity
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place
from tests.services.dlq.dead_letters import TOPIC, Message, dead_lettered, request

RECORD = Record(Place(Partition(TOPIC, 1), 7), Lane.STANDARD, b"k", b"v", (), 0)
NAMES = st.sampled_from(["mine", "loraq-error-code", "loraq-source-topic", "loraq-origin", "traceparent", ""])
HEADERS = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=20)), max_size=6).map(tuple)


@given(st.none() | st.binary(max_size=20), st.binary(max_size=60), HEADERS, st.sampled_from(list(ErrorCode)))
def test_the_original_record_is_separated_from_loraqs_headers(key, value, headers, code) -> None:
    letter = dead_lettered(value, key=key, headers=headers, code=code, message="why")
    assert (letter.key, letter.value, letter.headers) == (key, value, headers)
    assert (letter.code, letter.message, letter.omitted_bytes) == (code, "why", None)
    assert letter.source == Origin(TOPIC, 1, 7, 1_600_000_000_000)
    assert letter.position == DeadLetterPosition(2, 17)
    assert letter.dead_lettered_at.isoformat() == "2023-11-14T22:13:20.123000+00:00"


@given(st.text(max_size=30), st.integers(0, 9), st.integers(0, 2**63), st.integers(0, 2**48))
def test_an_origin_round_trips_through_its_header(topic: str, partition: int, offset: int, timestamp_ms: int) -> None:
    origin = Origin(topic.replace("/", ""), partition, offset, timestamp_ms)
    assert Origin.parsed(origin.encoded()) == origin


def test_a_value_that_was_too_large_is_replaced_by_its_size() -> None:
    letter = dead_lettered(b" " * 3_000_000)
    assert (letter.value, letter.omitted_bytes) == (b"", 3_000_000)


def test_a_record_that_loraq_did_not_write_has_neither_code_nor_source() -> None:
    letter = dead_letter_of(Message(b"k", b"v", [("mine", b"x")]))
    assert (letter.code, letter.source, letter.headers) == (None, None, (("mine", b"x"),))
    assert letter.message == "it has no loraq-error-code header"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("loraq-source-topic", None, "it has no loraq-source-topic header"),
        ("loraq-source-partition", b"-1", r"loraq-source-partition must be a number of at least 0 \(got '-1'\)"),
        ("loraq-source-offset", b"\xff", "loraq-source-offset must be a number"),
        ("loraq-source-timestamp", b"", "loraq-source-timestamp must be a number of at least -1"),
        ("loraq-value-omitted", b"much", r"loraq-value-omitted must be a number of at least 0 \(got 'much'\)"),
        ("loraq-value-omitted", b"9" * 5000, "loraq-value-omitted must be a number"),
    ],
)
def test_malformed_headers_are_reported_and_the_record_is_not_loraqs(
    name: str, content: bytes | None, message: str
) -> None:
    written = dead_letter(Rejection(RECORD, ErrorCode.INVALID_MESSAGE, "why"))
    headers = tuple({**dict(written.headers), name: content}.items())
    letter = dead_letter_of(Message(written.key, written.value, headers))
    assert (letter.code, letter.source, letter.omitted_bytes, letter.headers) == (None, None, None, headers)
    assert re.search(message, letter.message)
    assert len(letter.message) < 200


@pytest.mark.parametrize(
    ("timestamp", "year"), [(-1, 1969), (2**62, 9999), (-(2**62), 1), (2**48 - 1, 9999), (1_700_000_000_123, 2023)]
)
def test_a_timestamp_out_of_range_is_clamped(timestamp: int, year: int) -> None:
    assert dead_letter_of(Message(b"k", b"v", [], timestamp=timestamp)).dead_lettered_at.year == year


def test_tenant_and_adapter_come_from_the_value_or_else_the_key() -> None:
    job_id = "01930000-0000-7000-8000-000000000000"
    assert stated_identity(b"other/x", request(adapter="tone@3", job_id=job_id)) == ("acme", "tone@3", job_id)
    assert stated_identity(b"acme/tone", b"\xff not json") == ("acme", "tone", None)
    assert stated_identity(b"acme/tone", b"[1]") == ("acme", "tone", None)
    assert stated_identity(b"no slash", b"{}") == stated_identity(None, None) == (None, None, None)
    assert stated_identity(None, b"[" * 100_000) == (None, None, None)
