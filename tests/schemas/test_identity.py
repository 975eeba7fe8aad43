"""Derived job ids are UUIDv7 and stable; fingerprints depend on the request's meaning, not its encoding."""

import hashlib
import json
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.identity import derived_job_id, fingerprint
from schemas.job import JobRequest

places = st.tuples(
    st.text(max_size=30),
    st.text(max_size=30),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**48 - 1),
    st.binary(max_size=100),
)


@given(places)
def test_derived_id_is_a_uuid7_of_the_records_timestamp(place: tuple[str, str, int, int, int, bytes]) -> None:
    job_id = derived_job_id(*place)
    assert job_id.version == 7
    assert job_id.variant == RFC_4122
    assert job_id.int >> 80 == place[4]


@given(places)
def test_the_same_record_gets_the_same_id(place: tuple[str, str, int, int, int, bytes]) -> None:
    assert derived_job_id(*place) == derived_job_id(*place)


@given(places, places)
def test_another_record_gets_another_id(
    one: tuple[str, str, int, int, int, bytes], other: tuple[str, str, int, int, int, bytes]
) -> None:
    assert (derived_job_id(*one) == derived_job_id(*other)) == (one == other)


def test_the_id_of_a_known_record_never_changes() -> None:
    """With another formula, redelivered records would run a second time after an upgrade."""
    job_id = derived_job_id("cluster", "loraq.default.jobs.standard", 3, 42, 1_764_000_000_000, b'{"tenant": "acme"}')
    assert job_id == UUID("019ab697-e800-70cc-a5bc-b42baacb11ca")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aä€\\"\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abä"), inner, max_size=3),
    max_leaves=6,
)
REQUESTS = st.fixed_dictionaries(
    {"prompt": st.text("abä\n€", min_size=1)},
    optional={
        "adapter": st.sampled_from(["tone", "tone@3"]),
        "timeout_ms": st.integers(1, 10_000),
        "metadata": st.dictionaries(st.text("abä"), JSON_VALUES, max_size=3),
        "sampling": st.fixed_dictionaries({}, optional={"temperature": st.just(0.7), "max_tokens": st.just(128)}),
        "deadline": st.just("2030-01-01T00:00:00Z"),
        "webhook": st.just({"endpoint": "main"}),
    },
)


@given(REQUESTS)
def test_the_fast_fingerprint_equals_that_of_the_models_dump(fields: dict[str, object]) -> None:
    """The fast path of most requests gives the bytes that every earlier version stored."""
    request = _request(**fields)
    sent = request.model_dump(mode="json", exclude_defaults=True, exclude={"job_id"})
    text = json.dumps(sent, sort_keys=True, separators=(",", ":"))
    assert fingerprint(request) == hashlib.sha256(text.encode()).digest()


def test_parts_of_the_position_are_framed() -> None:
    assert derived_job_id("a", "bc", 0, 0, 0, b"") != derived_job_id("ab", "c", 0, 0, 0, b"")


@pytest.mark.parametrize("timestamp_ms", [-1, 2**48])
def test_a_timestamp_outside_48_bits_still_gives_a_uuid7(timestamp_ms: int) -> None:
    assert derived_job_id("c", "t", 0, 0, timestamp_ms, b"").version == 7


def _request(**fields: object) -> JobRequest:
    return JobRequest.model_validate_json(json.dumps({"tenant": "acme", "prompt": "Hello", **fields}))


def test_explicit_defaults_key_order_and_job_id_do_not_change_the_fingerprint() -> None:
    plain = _request()
    spelled = JobRequest.model_validate_json(
        '{"sampling": {"top_p": 1.0, "max_tokens": 128}, "metadata": {}, "prompt": "Hello", "adapter": null,'
        ' "tenant": "acme", "job_id": "0192aaaa-0000-7000-8000-000000000000"}'
    )
    assert fingerprint(plain) == fingerprint(spelled)


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": "other"},
        {"adapter": "tone"},
        {"adapter": "tone@1"},
        {"prompt": "Hello "},
        {"sampling": {"seed": 0}},
        {"sampling": {"max_tokens": 127}},
        {"deadline": "2030-01-01T00:00:00Z"},
        {"timeout_ms": 1000},
        {"webhook": {"endpoint": "main"}},
        {"metadata": {"a": 1}},
    ],
)
def test_every_field_counts_in_the_fingerprint(fields: dict[str, object]) -> None:
    assert fingerprint(_request(**fields)) != fingerprint(_request())


@pytest.mark.parametrize(
    "sampling", [{}, {"max_tokens": 128, "top_p": 1}, {"seed": 7}, {"temperature": 1, "stop": ["a"]}]
)
def test_the_fingerprint_is_of_the_canonical_json_without_defaults(sampling: dict[str, object]) -> None:
    """Computed step by step: a changed fingerprint would make every redelivery a conflict."""
    request = _request(sampling=sampling, metadata={"b": "ä", "a": 1e-7}, adapter="tone@1")
    sent = request.model_dump(mode="json", exclude_defaults=True, exclude={"job_id"})
    canonical = json.dumps(sent, sort_keys=True, separators=(",", ":")).encode()
    assert fingerprint(request) == hashlib.sha256(canonical).digest()


def test_a_prompt_and_its_characters_as_token_ids_differ() -> None:
    ids = JobRequest.model_validate_json('{"tenant": "acme", "prompt_token_ids": [72]}')
    assert fingerprint(ids) != fingerprint(_request(prompt="[72]"))
