"""NAME=VALUE as people type it."""

import pytest

from services.parsing.assignments import name_and_value


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("ticket=17", ("ticket", 17)),
        ("a.b=null", ("a.b", None)),
        ("who=support", ("who", "support")),
        ("empty=", ("empty", "")),
        ('twice=a="b"', ("twice", 'a="b"')),
        ("a..b=[1]", ("a..b", [1])),
    ],
)
def test_a_value_is_json_or_else_text(text: str, pair: tuple[str, object]) -> None:
    assert name_and_value(text) == pair


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no name and ="),
        ("=1", "has no name and ="),
        ("a", "has no name and ="),
        ("a=" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_none_is_told_briefly(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        name_and_value(text)
    assert len(str(refusal.value)) < 200
