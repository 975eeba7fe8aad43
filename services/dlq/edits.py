"""What is changed in a dead letter's value before it is sent back. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from schemas.job import JobRequest
from services.errors import InputError
from services.parsing.validation import sentence_of


@dataclass(frozen=True, slots=True)
class Edit:
    """Another value altogether, or fields that are set and removed; a path is names joined by dots."""

    value: bytes | None = None
    sets: tuple[tuple[str, Any], ...] = ()
    unsets: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether there is anything to change."""
        return self != Edit()

    def applied(self, value: bytes | None) -> bytes:
        """The value to send; raises InputError where the old one is no JSON object, so that no field can be set, or
        where the new one would be nested too deeply."""
        if self.value is not None:
            return self.value
        try:
            fields = from_json(value or b"")
        except ValueError as error:
            raise InputError(f"fields cannot be edited, its value is not JSON ({error}); give all of it") from error
        if not isinstance(fields, dict):
            raise InputError("fields cannot be edited, its value is no JSON object; give all of it")
        for path in self.unsets:
            _unset(fields, path)
        for path, content in self.sets:
            _set(fields, path, content)
        try:
            return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except RecursionError as error:
            raise InputError("fields cannot be edited like this: its value would be nested too deeply") from error


def why_invalid(value: bytes | None) -> str | None:
    """What is wrong with a value as a job request by this version of loraq; None if nothing is."""
    if value is None:
        return "it has no value"
    try:
        JobRequest.model_validate_json(value)
    except ValidationError as error:
        return sentence_of(error)
    return None


def _unset(fields: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    inner: Any = fields
    for parent in parents:
        inner = inner.get(parent) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(name, None)


def _set(fields: dict[str, Any], path: str, content: Any) -> None:
    *parents, name = path.split(".")
    inner = fields
    for parent in parents:
        inner = inner.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise InputError(f"field {path!r} cannot be set: {parent!r} is no object")
    inner[name] = content
