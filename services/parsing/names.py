"""Validates names of tenants, adapters and endpoints, and parses adapter references."""

import re

from schemas.common import ADAPTER_REF_PATTERN, NAME_PATTERN
from services.errors import InputError


def checked_name(what: str, name: str) -> str:
    """The name itself; raises InputError if it is not 1 to 64 of a-z 0-9 . _ - with a letter or digit at both ends."""
    if not is_name(name):
        raise InputError(
            f"{name!r} is not a valid {what} name: use 1 to 64 of a-z 0-9 . _ -, with a letter or digit at both ends"
        )
    return name


def is_name(text: str) -> bool:
    """Whether a tenant, adapter or endpoint can have this name; if not, a database lookup is unnecessary."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def parse_ref(ref: str) -> tuple[str, int | None]:
    """Name and version of `name` or `name@3`; raises InputError for anything else."""
    if not re.fullmatch(ADAPTER_REF_PATTERN, ref):
        raise InputError(f"{ref!r} is not an adapter reference: write NAME, or NAME@VERSION as in support-tone@3")
    name, _, version = ref.partition("@")
    return name, int(version) if version else None
