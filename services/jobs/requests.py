"""From a command's options, or a file of JSON lines, to valid requests."""

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
    """`--webhook`: an address if it looks like one, otherwise the name of a registered endpoint.

    Raises InputError if it can be neither.
    """
    if target is None:
        return None
    if "://" not in target and not re.fullmatch(NAME_PATTERN, target):
        raise InputError(f"--webhook {target!r} is neither an address, http://… or https://…, nor an endpoint's name")
    return {"url": target} if "://" in target else {"endpoint": target}


def one_request(fields: Mapping[str, Any]) -> JobRequest:
    """A request of these fields, None left out; raises InputError naming the first that is wrong."""
    given = _given(fields)
    for name, value in given.items():
        _check_unicode(name, value)
    return _validated(json.dumps(given), "the job")


def _check_unicode(name: str, value: Any) -> None:
    """Bytes of the command line that are not UTF-8, and halves of surrogate pairs: no text in JSON can hold them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the job: field {name!r} is not UTF-8, or holds half a surrogate pair; write it again"
        ) from error


def requests_of(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[JobRequest]:
    """One request per line that is not blank; `defaults` stand for what a line leaves out.

    Raises InputError naming file, line and field, so that nothing is sent unless everything is valid.
    """
    given = _given(defaults)
    try:
        requests = [
            _from_line(line, f"{name} line {number}", given) for number, line in enumerate(lines, 1) if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not requests:
        raise InputError(f"{name} holds no jobs; it takes one JSON object per line")
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


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != {}}
