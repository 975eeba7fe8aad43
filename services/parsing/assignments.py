"""Parses `NAME=VALUE` of command-line options. Pure."""

import json
from typing import Any

from services.parsing.validation import shown


def name_and_value(text: str) -> tuple[str, Any]:
    """The name and the value, which is JSON or else text.

    Raises ValueError if the name is missing or the JSON is nested too deeply.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{shown(text)} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except RecursionError as error:
        raise ValueError(f"the value of {name} is nested too deeply") from error
    except ValueError:
        return name, value
