"""`NAME=VALUE` as people type it in options. Pure."""

import json
from typing import Any

from services.parsing.validation import shown


def name_and_value(text: str) -> tuple[str, Any]:
    """The name, and the value as JSON, or as text where it is none.

    Raises ValueError where there is no name, and for JSON that is nested too deeply.
    """
    name, equals, content = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{shown(text)} has no name and = in front of its value")
    try:
        return name, json.loads(content)
    except RecursionError as error:
        raise ValueError(f"the value of {name} is nested too deeply") from error
    except ValueError:
        return name, content
