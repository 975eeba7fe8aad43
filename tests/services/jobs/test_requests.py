"""Requests from options and files; nothing is accepted in part."""

import pytest

from services.errors import InputError
from services.jobs.requests import one_request, requests_of, webhook_of


def test_options_become_a_request_with_an_id() -> None:
    request = one_request({"tenant": "acme", "adapter": None, "prompt": "hello", "sampling": {"max_tokens": 3}})
    assert request.job_id is not None
    assert (request.tenant, request.adapter, request.sampling.max_tokens) == ("acme", None, 3)


def test_an_invalid_option_is_reported() -> None:
    with pytest.raises(InputError, match=r"the job: field .sampling\.max_tokens.: Input should be greater"):
        one_request({"tenant": "acme", "prompt": "hello", "sampling": {"max_tokens": 0}})


@pytest.mark.parametrize(("name", "value"), [("prompt", "\udcff\udcfe"), ("metadata", {"a": "\ud800"})])
def test_a_field_that_is_not_utf_8_is_reported(name: str, value: object) -> None:
    fields = {"tenant": "acme", "prompt": "hello"} | {name: value}
    with pytest.raises(InputError, match=f"^the job: field '{name}' is not UTF-8 or contains a lone surrogate"):
        one_request(fields)


def test_a_webhook_is_a_url_or_an_endpoint() -> None:
    assert webhook_of("https://example.com/x") == {"url": "https://example.com/x"}
    assert webhook_of("orders") == {"endpoint": "orders"}
    assert webhook_of(None) is None
    with pytest.raises(InputError, match=r"--webhook 'example\.com/x' is neither a URL"):
        webhook_of("example.com/x")


def test_each_line_of_a_file_is_a_request_with_options_as_defaults() -> None:
    lines = ['{"prompt": "one"}\n', "\n", '{"prompt": "two", "tenant": "other", "adapter": "b"}\n']
    first, second = requests_of(lines, "jobs.jsonl", {"tenant": "acme", "adapter": "a", "sampling": {}})
    assert (first.tenant, first.adapter, first.prompt) == ("acme", "a", "one")
    assert (second.tenant, second.adapter, second.prompt) == ("other", "b", "two")


@pytest.mark.parametrize("defaults", [{}, {"tenant": "acme"}])
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "jobs.jsonl line 2: .*JSON"),
        ("[" * 100_000, "jobs.jsonl line 2: the value is not JSON: recursion limit exceeded"),
        ('{"metadata": ' + '{"a": ' * 100_000, "jobs.jsonl line 2: the value is not JSON: recursion limit exceeded"),
        ("[]", "jobs.jsonl line 2: the value is not a JSON object"),
        ('{"tenant": "acme", "prompt": "x", "colour": 1}', "jobs.jsonl line 2: field 'colour' is not known"),
    ],
)
def test_an_invalid_line_is_reported(line: str, sentence: str, defaults: dict[str, str]) -> None:
    with pytest.raises(InputError, match=sentence):
        requests_of(['{"tenant": "acme", "prompt": "x"}', line], "jobs.jsonl", defaults)


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(InputError, match=r"jobs\.jsonl contains no jobs"):
        requests_of(["\n"], "jobs.jsonl", {})
