"""The signature of a record, as docs/security.md defines it."""

import re
from pathlib import Path

from services.client.signing import signature

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
VECTOR = r"^    producer key +(\S+)\n    value +(.+)\n    loraq-signature +(\S+)$"


def test_the_pages_test_vector_is_right() -> None:
    [(key, value, expected)] = re.findall(VECTOR, PAGE, re.MULTILINE)
    assert key.startswith("lqpk_")
    assert signature(key.encode(), value.encode()) == expected
