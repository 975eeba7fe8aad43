"""Tokenizer, chat template and incremental detokenization."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import InvalidRequestError, ModelError
from engine.model.text import TextStream
from engine.model.tokenizer import Tokenizer
from tests.builders import CHAT_TEMPLATE, write_tokenizer

TEXT = "the 漢字 naïve 👩‍🚀 thin"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), prompt: str = "a prompt") -> TextStream:
    text = TextStream(tokenizer, tokenizer.encode(prompt), stop)
    for token_id in ids:
        if text.push(token_id):
            break
    return text


def test_never_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)
    for count in range(len(ids) + 1):
        text = stream(tokenizer, ids[:count]).text
        assert TEXT.startswith(text)
        assert text == tokenizer.decode(ids[:count]).rstrip("\ufffd")
    assert stream(tokenizer, ids).text == TEXT


@given(st.text(min_size=1), st.text(max_size=12))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    ids = tokenizer.encode(text)
    whole = text.removesuffix("\ufffd")
    assert stream(tokenizer, ids, prompt=prompt).text.startswith(whole.rstrip("\ufffd"))


@given(st.text("abé漢", min_size=4, max_size=30), st.integers(0, 25), st.integers(1, 4))
def test_stops_before_the_first_stop_string(tokenizer: Tokenizer, text: str, start: int, length: int) -> None:
    stop = text[start : start + length] or text[:2]
    assert stream(tokenizer, tokenizer.encode(text), ("zz", stop)).text == text[: text.index(stop)]


def test_stops_before_the_earliest_of_several_stop_strings(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, tokenizer.encode("one two three"), ("three", "two", "wo t")).text == "one "


def test_invalid_bytes_do_not_block_the_text_after_them(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("漢")[0]
    ids = [*tokenizer.encode("a"), *[broken] * 40, *tokenizer.encode("bc")]
    text = stream(tokenizer, ids).text
    assert text.startswith("a")
    assert text.endswith("bc")


def test_special_tokens_are_omitted(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, tokenizer.encode("a<|im_end|>b<|endoftext|>c")).text == "abc"


def test_renders_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "{{ 7 * 7 }}"}]
    assert tokenizer.render(messages) == (
        "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\n{{ 7 * 7 }}<|im_end|>\n<|im_start|>assistant\n"
    )


def with_template(path: Path, template: object) -> Tokenizer:
    write_tokenizer(path)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return Tokenizer(path)


def test_templates_can_be_named_or_in_a_file(tmp_path: Path) -> None:
    named = with_template(
        tmp_path, [{"name": "tool", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
    )
    assert "<|im_start|>user" in named.render([{"role": "user", "content": "hi"}])
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert Tokenizer(tmp_path).render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"


def test_the_error_quotes_the_exception_of_the_template(tmp_path: Path) -> None:
    strict = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        strict.encode_chat([{"role": "user", "content": "hi"}])


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    hostile = with_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        hostile.encode_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_a_chat_template_rejects_messages(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template; send a prompt"):
        with_template(tmp_path, None).encode_chat([{"role": "user", "content": "hi"}])


def test_errors_name_the_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"chat template in .* is invalid"):
        with_template(tmp_path, "{% for %}")
    (tmp_path / "tokenizer_config.json").write_text("[" * 50_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer(tmp_path)
