"""Variables of the environment that look like settings and are none: a misspelt one would have no effect in silence."""

from collections.abc import Collection
from difflib import get_close_matches

from services.process.settings import Settings

PREFIX = "LORAQ_"
OF_THE_ENGINE = "LORAQ_KERNEL_CACHE"


def unknown_variables(names: Collection[str]) -> str | None:
    """One sentence about all of the names that begin as settings do but are none; None if there are none."""
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {OF_THE_ENGINE}
    unknown = sorted(name for name in names if name.upper().startswith(PREFIX) and name.upper() not in known)
    if not unknown:
        return None
    told = ", ".join(f"{name}{_nearest(name.upper(), known)}" for name in unknown)
    return f"{told}: no such setting, it has no effect; docs/configuration.md lists them"


def _nearest(name: str, known: Collection[str]) -> str:
    """Compared without the prefix, which is alike in all."""
    endings = {each.removeprefix(PREFIX): each for each in known}
    near = get_close_matches(name.removeprefix(PREFIX), endings, n=1)
    return f" (did you mean {endings[near[0]]}?)" if near else ""
