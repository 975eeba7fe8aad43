"""Validation of records, and the messages of rejections."""

import json
from typing import Any

import pytest

from schemas.common import ErrorCode, Lane
from services.client.signing import SIGNATURE_HEADER, signature
from services.kafka.headers import ORIGIN, REPLAY_OF
from services.worker.intake.records import TenantKey, authenticate, parse
from services.worker.jobs import Candidate, Headers, Record, Rejection
from services.worker.offsets.ledger import Partition, Place

TENANTS = {"acme": TenantKey(b"key", disabled=False), "gone": TenantKey(b"key", disabled=True)}
DAMAGED = {"acme": TenantKey(None, disabled=False)}


def record(value: bytes | None, headers: Headers = (), offset: int = 7) -> Record:
    return Record(Place(Partition("jobs", 1), offset), Lane.STANDARD, None, value, headers, 1_700_000_000_000)


def parsed(value: bytes | None, headers: Headers = ()) -> Candidate | Rejection:
    return parse(record(value, headers), "cluster", 1.0, 1)


def candidate(headers: Headers = (), **fields: Any) -> Candidate:
    found = parsed(json.dumps({"tenant": "acme", "prompt": "hello"} | fields).encode(), headers)
    assert isinstance(found, Candidate)
    return found


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "the record has no value; a job request is a JSON object"),
        (b"", "the value is not JSON: EOF while parsing a value at line 1 column 0"),
        (b"\xff\xfe", "the value is not JSON: expected value at line 1 column 1"),
        (b"[" * 100_000, "the value is not JSON: recursion limit exceeded at line 1 column 202"),
        (b"[]", "the value is not a JSON object"),
        (b" " * 1_048_577, "the value has 1048577 bytes; a job request has at most 1048576"),
        (b'{"prompt": "x"}', "field 'tenant' is missing"),
        (b'{"tenant": "a", "prompt": "x", "colour": 1}', "field 'colour' is not known"),
        (b'{"tenant": "a"}', "give exactly one of prompt, messages and prompt_token_ids; found none"),
        (
            b'{"tenant": "a", "prompt": "x", "sampling": {"temperature": "hot"}}',
            "field 'sampling.temperature': Input should be a valid number (got 'hot')",
        ),
        (
            b'{"tenant": "a", "prompt": "x", "webhook": {}}',
            "field 'webhook': give exactly one of url and endpoint (got {})",
        ),
    ],
)
def test_a_rejection_names_the_error(value: bytes | None, sentence: str) -> None:
    found = parsed(value)
    assert isinstance(found, Rejection)
    assert (found.code, found.message) == (ErrorCode.INVALID_MESSAGE, sentence)


def test_a_replayed_record_without_an_id_keeps_its_job_id() -> None:
    first = candidate()
    origin = (ORIGIN, b"jobs/1/7/1700000000000")
    moved = parse(record(first.record.value, (origin,), offset=99), "cluster", 1.0, 1)
    assert isinstance(moved, Candidate)
    assert moved.key == first.key
    elsewhere = parse(record(first.record.value, (), offset=99), "cluster", 1.0, 1)
    assert isinstance(elsewhere, Candidate)
    assert elsewhere.key != first.key


@pytest.mark.parametrize("content", [b"", b"jobs/1/7", b"jobs/one/7/0", b"\xff/1/2/3", None])
def test_an_invalid_origin_is_rejected(content: bytes | None) -> None:
    found = parsed(b'{"tenant": "acme", "prompt": "hello"}', ((ORIGIN, content),))
    assert (found.message if isinstance(found, Rejection) else None) == (
        None if content is None else "the header 'loraq-origin' is not topic/partition/offset/timestamp; leave it out"
    )


def test_the_replayed_job_comes_from_the_header() -> None:
    old = "01930000-0000-7000-8000-000000000000"
    assert str(candidate(((REPLAY_OF, old.encode()),)).replay_of) == old
    assert candidate().replay_of is None
    for content in (b"", b"\xff", b"job"):
        found = parsed(b'{"tenant": "acme", "prompt": "hello"}', ((REPLAY_OF, content),))
        assert isinstance(found, Rejection)
        assert found.message == "the header 'loraq-replay-of' is not a UUID; leave it out"


def test_a_rejection_quotes_only_a_part_of_a_long_value() -> None:
    found = parsed(json.dumps({"tenant": "A" * 10_000, "prompt": "x"}).encode())
    assert isinstance(found, Rejection)
    assert len(found.message) < 300


def test_a_record_without_an_id_always_gets_the_same_job_id() -> None:
    value = b'{"tenant": "acme", "prompt": "x"}'
    first, again, other = (parse(record(value, offset=offset), "cluster", 1.0, 1) for offset in (7, 7, 8))
    assert isinstance(first, Candidate)
    assert isinstance(again, Candidate)
    assert isinstance(other, Candidate)
    assert first.key == again.key != other.key


def test_the_last_of_two_headers_with_one_name_counts() -> None:
    assert candidate((("traceparent", b"first"), ("traceparent", b"last"))).traceparent == "last"
    assert candidate((("traceparent", None),)).traceparent is None


def refusal(found: Candidate, *, signed: bool = False) -> str | None:
    rejection = authenticate(found, TENANTS, require_signature=signed)
    assert rejection is None or rejection.code is ErrorCode.UNAUTHENTICATED
    return rejection.message if rejection else None


def test_only_registered_and_active_tenants_may_send() -> None:
    assert refusal(candidate()) is None
    assert refusal(candidate(tenant="who")) == "no tenant 'who' is registered; add it with `loraq tenants add`"
    assert refusal(candidate(tenant="gone")) == "tenant 'gone' is disabled"


def test_a_required_signature_must_match_the_value() -> None:
    value = candidate().record.value
    assert value is not None
    good = signature(b"key", value)
    assert refusal(candidate(((SIGNATURE_HEADER, good.encode()),)), signed=True) is None
    assert refusal(candidate(((SIGNATURE_HEADER, good.upper().encode()),)), signed=True) is None
    assert refusal(candidate(), signed=True) == f"the record has no {SIGNATURE_HEADER} header, which this pool requires"
    for wrong in (good[:-1], "", "é", signature(b"other", value)):
        found = candidate(((SIGNATURE_HEADER, wrong.encode()),))
        expected = f"the {SIGNATURE_HEADER} header does not match the producer key of tenant 'acme'"
        assert refusal(found, signed=True) == expected


def test_with_a_damaged_key_no_signature_is_valid_and_the_tenant_is_named() -> None:
    found = candidate(((SIGNATURE_HEADER, b"any"),))
    rejection = authenticate(found, DAMAGED, require_signature=True)
    assert rejection is not None
    assert rejection.code is ErrorCode.UNAUTHENTICATED
    assert rejection.message.startswith("the producer key of tenant 'acme' is damaged in the database")
    assert authenticate(found, DAMAGED, require_signature=False) is None
