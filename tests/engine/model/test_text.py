"""Tokenizer, chat template and incremental detokenization."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import InvalidRequestError, ModelError
from engine.model.text import TextStream
from engine.model.tokenizer import Tokenizer
from engine.model.vocabulary import byte_level_bytes
from tests.builders import CHAT_TEMPLATE, write_tokenizer
from tests.engine.model.test_vocabulary import sentencepiece_like

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


SMOL_SPECIAL = [1, 2, 3, 4, 5, 6]


def test_special_tokens_do_not_delay_text(base_model_dir: Path) -> None:
    tokenizer = Tokenizer(base_model_dir)
    ids = [*tokenizer.encode("a"), *SMOL_SPECIAL, *tokenizer.encode("\U0001f680漢é z")]
    assert stream(tokenizer, ids).text == tokenizer.decode(ids) == "a\U0001f680漢é z"


CONTINUATIONS = [bytes([first, *[0x80] * more]) for first in (0x80, 0x90, 0xA0) for more in range(3)]


def without_incomplete_character(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of all tokens, without the last character if more bytes could change it."""
    whole = tokenizer.decode(ids)
    byte_ids = {byte_level_bytes(token): each for each in range(320) if (token := tokenizer.token(each)) is not None}
    more = [[byte_ids[bytes([byte])] for byte in each] for each in CONTINUATIONS]
    return whole if all(tokenizer.decode([*ids, *each]).startswith(whole) for each in more) else whole[:-1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 330) | st.sampled_from(range(100, 260)), max_size=40))
def test_incremental_text_equals_that_of_the_whole_list(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = TextStream(tokenizer, tokenizer.encode("a prompt"), ())
    for count, token_id in enumerate(ids, start=1):
        assert not text.push(token_id)
        whole = tokenizer.decode(ids[:count])
        assert whole.startswith(text.text)
        assert set(whole[len(text.text) :]) <= {"\ufffd"}
    text.close()
    assert text.text == without_incomplete_character(tokenizer, ids)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_incremental_text_of_the_real_tokenizer(base_model_dir: Path, data: st.DataObject) -> None:
    tokenizer = real_tokenizer(base_model_dir)
    text = data.draw(st.text(max_size=30))
    ids = tokenizer.encode(text)
    for at in data.draw(st.lists(st.integers(0, len(ids)), max_size=12)):
        ids[at:at] = [data.draw(st.sampled_from(SMOL_SPECIAL))]
    grown = stream(tokenizer, ids)
    grown.close()
    assert grown.text == tokenizer.decode(ids)


@lru_cache(maxsize=1)
def real_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffd", "\ufffd\ufffd\ufffd", "é\ufffd z\ufffd"])
def test_a_replacement_character_in_the_text_is_kept(tokenizer: Tokenizer, text: str) -> None:
    assert stream(tokenizer, tokenizer.encode(text)).text == text


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece_like().save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", " ab", "  ", "é", "漢", "\U0001f680", "</s>", "c.", "\ufffd"]), max_size=12))
def test_incremental_text_of_a_tokenizer_with_byte_tokens(sentencepiece: Tokenizer, parts: list[str]) -> None:
    ids = sentencepiece.encode("".join(parts))
    text = TextStream(sentencepiece, [], ())
    for count, token_id in enumerate(ids, start=1):
        text.push(token_id)
        assert sentencepiece.decode(ids[:count]).startswith(text.text)
    text.close()
    assert text.text == sentencepiece.decode(ids)


def test_an_incomplete_character_of_byte_tokens_is_omitted(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a\U0001f680漢")
    for dropped, shown in [(0, "a\U0001f680漢"), (1, "a\U0001f680"), (2, "a\U0001f680"), (3, "a\U0001f680"), (4, "a")]:
        text = stream(sentencepiece, ids[: len(ids) - dropped])
        text.close()
        assert text.text == shown


@pytest.mark.parametrize(
    ("stop", "generated", "shown"),
    [
        (("<|im_start|>",), "a b<|im_start|>c", "a b"),
        (("<|im_start|>",), "<|im_end|>a<|endoftext|> b<|im_start|>c", "a b"),
        (("\n<|im_start|>user",), "a\n<|im_start|>the\n<|im_start|>user", "a\nthe"),
        (("b<|im_end|><|im_start|>",), "ab<|im_end|>b<|im_end|><|im_start|>", "ab"),
        (("<|im_end|>c", "never"), "a<|im_end|>b<|im_end|>c", "ab"),
        (("ab",), "a<|im_end|>b c", ""),
        (("zz", "<|im_start|>"), "the zz<|im_start|>", "the "),
    ],
)
def test_a_stop_string_may_contain_special_tokens(
    tokenizer: Tokenizer, stop: tuple[str, ...], generated: str, shown: str
) -> None:
    ids = tokenizer.encode(generated)
    text = TextStream(tokenizer, [], stop)
    assert any(text.push(token_id) for token_id in ids)
    assert text.text == shown
    assert stream(tokenizer, ids, stop).text == shown


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
