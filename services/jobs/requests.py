"""Builds valid requests from command-line options or from a file of JSON lines."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from schemas.common import NAME_PATTERN
from schemas.job import JobRequest
from services.client.producer import with_job_id
from services.errors import InputError
from services.parsing.validation import sentence_of


def webhook_of(target: str | None) -> dict[str, str] | None:
    """The request's `webhook`: a URL if it looks like one, otherwise the name of a registered endpoint.

    Raises InputError if it is neither.
    """
    if target is None:
        return None
    if "://" not in target and not re.fullmatch(NAME_PATTERN, target):
        raise InputError(f"--webhook {target!r} is neither a URL (http://… or https://…) nor an endpoint's name")
    return {"url": target} if "://" in target else {"endpoint": target}


def one_request(fields: Mapping[str, Any]) -> JobRequest:
    """A request with these fields, None left out; raises InputError naming the first invalid field."""
    present = _present(fields)
    for name, value in present.items():
        _check_unicode(name, value)
    return _validated(json.dumps(present), "the job")


def _check_unicode(name: str, value: Any) -> None:
    """Raise InputError for lone surrogates, which arguments that are not UTF-8 also become: JSON cannot hold them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the job: field {name!r} is not UTF-8 or contains a lone surrogate; encode it as UTF-8"
        ) from error


def requests_of(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[JobRequest]:
    """One request per non-blank line, with `defaults` for missing fields.

    Raises InputError naming file, line and field of the first error: nothing is sent unless all lines are valid.
    """
    present = _present(defaults)
    try:
        requests = [
            _from_line(line, f"{name} line {number}", present) for number, line in enumerate(lines, 1) if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not requests:
        raise InputError(f"{name} contains no jobs; write one JSON object per line")
    return requests


def _from_line(line: str, place: str, defaults: Mapping[str, Any]) -> JobRequest:
    if not defaults:
        return _validated(line, place)
    try:
        fields = from_json(line)
    except ValueError as error:
        raise InputError(f"{place}: the value is not JSON: {error}") from error
    return _validated(json.dumps({**defaults, **fields}) if isinstance(fields, dict) else line, place)


def _validated(text: str, place: str) -> JobRequest:
    try:
        return with_job_id(JobRequest.model_validate_json(text))
    except ValidationError as error:
        raise InputError(f"{place}: {sentence_of(error)}") from error


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != {}}
