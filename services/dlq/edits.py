"""Edits of a dead letter's value before its replay. Pure."""

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
    """A new value, or fields to set and remove; a path is names joined by dots."""

    value: bytes | None = None
    sets: tuple[tuple[str, Any], ...] = ()
    unsets: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return self == Edit()

    def applied(self, value: bytes | None) -> bytes:
        """The edited value; raises InputError for fields of a value that is not a JSON object, or nested too deeply."""
        if self.value is not None:
            return self.value
        try:
            fields = from_json(value or b"")
        except ValueError as error:
            raise InputError(f"its value is not JSON ({error}), so fields cannot be edited; use --edit") from error
        if not isinstance(fields, dict):
            raise InputError("its value is not a JSON object, so fields cannot be edited; use --edit")
        for path in self.unsets:
            _unset(fields, path)
        for path, content in self.sets:
            _set(fields, path, content)
        try:
            return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except RecursionError as error:
            raise InputError("the edited value would be nested too deeply") from error


def why_invalid(value: bytes | None) -> str | None:
    """Why a value is not a valid job request in this version of loraq; None if it is."""
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
            raise InputError(f"field {path!r} cannot be set: {parent!r} is not an object")
    inner[name] = content
