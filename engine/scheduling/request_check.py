"""Checks the types of a request's fields before any of them is used."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequestError
from engine.types import Request, SamplingParams, is_integer

STRINGS = ("request_id", "adapter", "displaces", "prompt")
LISTS = ("prompt_token_ids", "messages")
BYTES = (str, bytes, bytearray, memoryview)
"""Sequences that are not accepted as lists."""


def check_types(request: Request) -> None:
    """Raise InvalidRequestError naming the first field of the wrong type; lengths and values are not checked."""
    if not isinstance(request, Request):
        raise InvalidRequestError(f"a request must be an engine.Request, not {type(request).__name__}")
    _check("tenant", request.tenant, str, "a string")
    _check("sampling", request.sampling, SamplingParams, "SamplingParams")
    _check("allow_special_tokens", request.allow_special_tokens, bool, "true or false")
    for name in STRINGS:
        _check(name, getattr(request, name), str | None, "a string")
    for name in LISTS:
        _check(name, getattr(request, name), Sequence | None, "a list")
        if isinstance(getattr(request, name), BYTES):
            raise InvalidRequestError(f"{name} must be a list, not {type(getattr(request, name)).__name__}")
    if sum(prompt is not None for prompt in (request.prompt_token_ids, request.prompt, request.messages)) != 1:
        raise InvalidRequestError("give exactly one of prompt_token_ids, prompt and messages")
    check_encodable("tenant", request.tenant)


def check_messages(messages: Sequence[Any]) -> None:
    """Raise InvalidRequestError naming the first message, or field of one, of the wrong type."""
    for index, message in enumerate(messages):
        _check(f"messages[{index}]", message, Mapping, "a mapping")
        for name, value in message.items():
            _check(f"a key of messages[{index}]", name, str, "a string")
            _check(f"messages[{index}].{name}", value, str, "a string")
            check_encodable(f"messages[{index}].{name}", value)


def check_token_ids(ids: Sequence[Any]) -> None:
    """Raise InvalidRequestError naming the first prompt token id that is not a whole number."""
    if set(map(type, ids)) <= {int}:
        return
    for index, token_id in enumerate(ids):
        if not is_integer(token_id):
            raise InvalidRequestError(
                f"prompt_token_ids[{index}] must be a whole number, not {type(token_id).__name__}"
            )


def check_encodable(name: str, text: str) -> None:
    """Raise InvalidRequestError if a text cannot be encoded as UTF-8 because of a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequestError(f"{name} holds a lone surrogate, U+{code:04X}, at character {error.start}") from error


def _check(name: str, value: object, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name} must be {wanted}, not {type(value).__name__}")
