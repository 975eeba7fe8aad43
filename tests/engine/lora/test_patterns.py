"""Expressions match as in `re`, but in bounded time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import AdapterError
from engine.lora.patterns import ModulePattern

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
] + ["model.embed_tokens", "lm_head"]

EXPRESSIONS = [
    r".*\.(q|v)_proj",
    r"model\.layers\.[0-1]\.(self_attn|mlp)\.\w+",
    r"(?!model\.layers\.0).*_proj$",
    r"^(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:up_proj))$",
    r"lm_hea[^a-c]",
    r".{3,7}",
    r"(model|lm)?[._]\D+\s*",
    r"\Amodel\b.+\B\S\Z",
    r"(?:[a-z_]+\.?)+",
    "",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_matches_as_re_does(expression: str) -> None:
    pattern = ModulePattern(expression, "target_modules")
    for module in MODULES:
        assert pattern.matches(module) is (re.fullmatch(expression, module) is not None)
        by_end = re.match(rf"(?:.*\.)?(?:{expression})$", module) is not None
        assert pattern.matches_ending(module) is by_end


small = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "(?=a)", "(?!b)", "^", "$", r"\b"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{0,2}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@given(small, st.text("ab.", max_size=6))
def test_agrees_with_re_on_any_expression(expression: str, text: str) -> None:
    assert ModulePattern(expression, "field").matches(text) is (re.fullmatch(expression, text) is not None)


@pytest.mark.parametrize(
    "expression", ["(.|.)*x", "(a|aa)+(.*)*(.*)*(.*)*x", "(.?){500}x", "(.*.*.*.*.*.*)*x", "((.*)*)*x"]
)
def test_no_expression_causes_exponential_backtracking(expression: str) -> None:
    started = time.monotonic()
    assert not ModulePattern(expression, "target_modules").matches("model.layers.0.self_attn.q_proj" * 3)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("q_proj(", "not a regular expression"),
        ("(?i)q", "sets flags"),
        ("a" * 2000, "2000 characters"),
        ("(" * 900 + ")" * 900, "characters|not a regular expression"),
    ],
)
def test_malformed_expressions_are_rejected_on_construction(expression: str, sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence):
        ModulePattern(expression, "rank_pattern")


@pytest.mark.parametrize("expression", [r"(a)\1", r"(?<=a)b", r"(?>a)"])
def test_unsupported_features_are_reported(expression: str) -> None:
    with pytest.raises(AdapterError, match="unsupported feature"):
        ModulePattern(expression, "target_modules").matches("ab")
