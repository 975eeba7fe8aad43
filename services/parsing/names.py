"""Names and references as people type them."""

import re

from schemas.common import ADAPTER_REF_PATTERN, NAME_PATTERN
from services.errors import InputError


def checked_name(what: str, name: str) -> str:
    """The name itself; raises InputError if it is not 1 to 64 of a-z 0-9 . _ - with a letter or digit at both ends."""
    if not is_name(name):
        raise InputError(
            f"{name!r} cannot be the name of {_article(what)} {what}: use 1 to 64 of a-z 0-9 . _ -, "
            "with a letter or digit at both ends"
        )
    return name


def is_name(text: str) -> bool:
    """Whether a tenant, adapter or endpoint can have that name; what cannot is not worth a question to the database."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def parse_ref(ref: str) -> tuple[str, int | None]:
    """Name and version of `name` or `name@3`; raises InputError for anything else."""
    if not re.fullmatch(ADAPTER_REF_PATTERN, ref):
        raise InputError(f"{ref!r} names no adapter: write NAME, or NAME@VERSION as in support-tone@3")
    name, _, version = ref.partition("@")
    return name, int(version) if version else None


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"
