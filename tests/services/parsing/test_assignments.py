"""NAME=VALUE of options."""

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
    ("text", "reason"),
    [
        ("", "is not NAME=VALUE"),
        ("=1", "is not NAME=VALUE"),
        ("a", "is not NAME=VALUE"),
        ("a=" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_an_invalid_assignment_is_reported_briefly(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        name_and_value(text)
    assert len(str(refusal.value)) < 200
