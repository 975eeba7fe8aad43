"""Finds LORAQ_… environment variables that are not settings: a misspelt one would be ignored silently."""

from collections.abc import Collection
from difflib import get_close_matches

from services.process.settings import Settings

PREFIX = "LORAQ_"
ENGINE_VARIABLE = "LORAQ_KERNEL_CACHE"


def unknown_variables(names: Collection[str]) -> str | None:
    """One warning that lists all names with the prefix of settings that are not settings; None if there are none."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {ENGINE_VARIABLE}
    unknown = sorted(name for name in names if name.upper().startswith(PREFIX) and name.upper() not in known)
    if not unknown:
        return None
    listed = ", ".join(f"{name}{_suggestion(name.upper(), known)}" for name in unknown)
    return f"{listed}: unknown setting, ignored; docs/configuration.md lists all settings"


def _suggestion(name: str, known: Collection[str]) -> str:
    """Names are compared without the prefix that they share."""
    endings = {each.removeprefix(PREFIX): each for each in known}
    near = get_close_matches(name.removeprefix(PREFIX), endings, n=1)
    return f" (did you mean {endings[near[0]]}?)" if near else ""
