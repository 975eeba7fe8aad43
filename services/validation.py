"""How a pydantic refusal is told to a person: one sentence that names the first field that is wrong."""

from pydantic import ValidationError

MAX_SHOWN_INPUT = 80


def sentence_of(error: ValidationError) -> str:
    """For instance: field 'sampling.max_tokens': Input should be greater than or equal to 1 (got 0)."""
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
            return f"field {field!r}: {message} (got {_shown(first['input'])})" if field else message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT else text[:MAX_SHOWN_INPUT] + "…"
