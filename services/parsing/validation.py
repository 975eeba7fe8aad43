"""Turns pydantic's errors into sentences, and reads the identity that an invalid record states."""

from pydantic import ValidationError
from pydantic_core import from_json

MAX_SHOWN_INPUT = 80


def sentence_of(error: ValidationError) -> str:
    """The first error, as in: field 'sampling.max_tokens': Input should be greater than or equal to 1 (got 0)."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "json_invalid":
            return f"the value is not JSON: {message.removeprefix('Invalid JSON: ')}"
        case "model_type" if not field:
            return "the value is not a JSON object"
        case "extra_forbidden":
            return f"field {field!r} is not known"
        case "missing":
            return f"field {field!r} is missing"
        case _:
            return f"field {field!r}: {message} (got {shown(first['input'])})" if field else message


def shown(value: object) -> str:
    """The value's repr for a message, truncated."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT else text[:MAX_SHOWN_INPUT] + "…"


def stated_identity(key: bytes | None, value: bytes | None) -> tuple[str | None, str | None, str | None]:
    """Tenant, adapter and job_id from the value if that is a JSON object, or else from the key `tenant/adapter`."""
    try:
        fields = from_json(value or b"")
    except ValueError:
        fields = None
    if isinstance(fields, dict) and isinstance(fields.get("tenant"), str):
        adapter, job_id = fields.get("adapter"), fields.get("job_id")
        return (
            fields["tenant"],
            adapter if isinstance(adapter, str) else None,
            job_id if isinstance(job_id, str) else None,
        )
    tenant, slash, adapter = (key or b"").decode("utf-8", "replace").partition("/")
    return (tenant, adapter or None, None) if slash and tenant else (None, None, None)
