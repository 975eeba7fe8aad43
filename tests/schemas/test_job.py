"""An invalid JobRequest is refused with the name of the field, and its JSON Schema refuses it too."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from pydantic import ValidationError

from schemas.common import MAX_METADATA_BYTES
from schemas.job import MAX_URL_CHARS, JobRequest

GOOD: dict[str, Any] = {"tenant": "acme", "prompt": "Hello"}
SCHEMA = Draft202012Validator(JobRequest.model_json_schema(), format_checker=FormatChecker(["uuid"]))

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tenant", {"tenant": ""}),
    ("tenant", {"tenant": "Acme"}),
    ("tenant", {"tenant": "-acme"}),
    ("tenant", {"tenant": "a" * 65}),
    ("tenant", {"tenant": 7}),
    ("job_id", {"job_id": "no-uuid"}),
    ("adapter", {"adapter": "tone@0"}),
    ("adapter", {"adapter": "tone@"}),
    ("adapter", {"adapter": "../tone"}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": 5}),
    ("prompt_token_ids", {"prompt": None, "prompt_token_ids": []}),
    ("prompt_token_ids", {"prompt": None, "prompt_token_ids": [-1]}),
    ("prompt_token_ids", {"prompt": None, "prompt_token_ids": [2**31]}),
    ("messages", {"prompt": None, "messages": []}),
    ("role", {"prompt": None, "messages": [{"role": "tool", "content": "x"}]}),
    ("content", {"prompt": None, "messages": [{"role": "user"}]}),
    ("max_tokens", {"sampling": {"max_tokens": 0}}),
    ("max_tokens", {"sampling": {"max_tokens": "12"}}),
    ("max_tokens", {"sampling": {"max_tokens": 1.5}}),
    ("temperature", {"sampling": {"temperature": -0.1}}),
    ("top_p", {"sampling": {"top_p": 0.0}}),
    ("top_k", {"sampling": {"top_k": -1}}),
    ("logprobs", {"sampling": {"logprobs": 21}}),
    ("temprature", {"sampling": {"temprature": 0.5}}),
    ("timeout_ms", {"timeout_ms": 0}),
    ("webhook", {"webhook": {}}),
    ("url", {"webhook": {"url": "https://example.org/" + "a" * MAX_URL_CHARS}}),
    ("webhook", {"webhook": {"url": "https://example.org/", "endpoint": "main"}}),
    ("metadata", {"metadata": []}),
    ("surprise", {"surprise": 1}),
    ("prompt", {"prompt": None}),
    ("prompt", {"messages": [{"role": "user", "content": "x"}]}),
]
# Bounds that JSON Schema cannot express, or only as an annotation.
ONLY_PYDANTIC: list[tuple[str, dict[str, Any]]] = [
    ("deadline", {"deadline": "tomorrow"}),
    ("deadline", {"deadline": "2030-01-01T00:00:00"}),
    ("url", {"webhook": {"url": "ftp://example.org/"}}),
    ("url", {"webhook": {"url": "https://example.org/" + "\u20ac" * 300}}),
    ("metadata", {"metadata": {"k": "x" * MAX_METADATA_BYTES}}),
    ("U+0000", {"metadata": {"k": "a\0b"}}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED + ONLY_PYDANTIC)
def test_an_invalid_field_is_named(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate_json(json.dumps(GOOD | fields))
    error = caught.value.errors()[0]
    assert name in map(str, error["loc"]) or name in error["msg"]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_the_json_schema_refuses_the_same(name: str, fields: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid(GOOD | fields)


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ('{"a":NaN}', "metadata.a"),
        ('{"a":"NaN","b":[1,{"c":-Infinity}]}', "metadata.b.1.c"),
        ('{"a":1e999}', "metadata.a"),
    ],
)
def test_a_number_in_metadata_that_is_not_finite_is_refused_with_its_path(metadata: str, path: str) -> None:
    with pytest.raises(ValidationError, match=f"{path} is not a finite number, which JSON requires"):
        JobRequest.model_validate_json(f'{{"tenant":"acme","prompt":"Hello","metadata":{metadata}}}')


def test_the_names_of_such_numbers_are_allowed_in_strings() -> None:
    metadata = {"NaN": "Infinity", "a": ["-Infinity", 1e308]}
    assert JobRequest.model_validate(GOOD | {"metadata": metadata}).metadata == metadata


@pytest.mark.parametrize("value", [b"", b"not json", b"[]", b"null", b'{"tenant": "acme"', b"\xff\xfe"])
def test_anything_but_a_json_object_is_refused(value: bytes) -> None:
    with pytest.raises(ValidationError):
        JobRequest.model_validate_json(value)


names = st.from_regex(r"\A[a-z0-9](?:[a-z0-9._-]{0,20}[a-z0-9])?\Z")
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": text}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": text}),
                min_size=1,
                max_size=3,
            )
        }
    ),
)
requests = st.builds(
    lambda prompt, rest: prompt | rest,
    prompts,
    st.fixed_dictionaries(
        {"tenant": names},
        optional={
            "job_id": st.uuids().map(str),
            "adapter": st.one_of(st.none(), names, names.map(lambda name: f"{name}@3")),
            "timeout_ms": st.integers(1, 86_400_000),
            "deadline": st.just("2030-01-01T00:00:00+02:00"),
            "sampling": st.fixed_dictionaries(
                {},
                optional={
                    "max_tokens": st.integers(1, 4096),
                    "temperature": st.floats(0, 10),
                    "stop": st.lists(text, max_size=3),
                },
            ),
            "webhook": st.sampled_from([{"url": "https://example.org/hook"}, {"endpoint": "main"}]),
            "metadata": st.dictionaries(text, st.one_of(text, st.integers(-(2**53), 2**53), st.none()), max_size=3),
        },
    ),
)


@given(requests)
def test_valid_requests_pass_and_survive_a_round_trip(fields: dict[str, Any]) -> None:
    request = JobRequest.model_validate_json(json.dumps(fields))
    assert JobRequest.model_validate_json(request.model_dump_json()) == request
    assert SCHEMA.is_valid(fields)
