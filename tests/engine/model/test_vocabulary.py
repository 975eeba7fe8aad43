"""Bounds on the number of tokens hold for every text, and cutting a text never makes it longer."""

import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from engine.model.tokenizer import Tokenizer
from engine.model.vocabulary import COMPOSING, TokenCounts, byte_level_bytes
from engine.scheduling.input_processor import SURE_SHARE
from tests.builders import write_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "a", "b", "c", ".", "\u2581a", "ab", "\u2581ab", "\u2581\u2581", "\u2581\u2581\u2581\u2581"]
MERGES = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b"), ("\u2581", "\u2581"), ("\u2581\u2581", "\u2581\u2581")]


def sentencepiece_like(normalizer: normalizers.Normalizer | None = None) -> RustTokenizer:
    """A tokenizer like that of Llama 2: U+2581 for spaces, tokens for single bytes, no pre-tokenizer."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    tokenizer = RustTokenizer(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> RustTokenizer:
    return RustTokenizer.from_file(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"))


@pytest.fixture(scope="module")
def smol(base_model_dir: Path) -> RustTokenizer:
    return RustTokenizer.from_file(str(base_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def bounded(byte_level: RustTokenizer, smol: RustTokenizer) -> list[tuple[RustTokenizer, TokenCounts]]:
    tokenizers = [
        byte_level,
        smol,
        composed(byte_level),
        composed(smol),
        stripping(byte_level),
        stripping(smol),
        sentencepiece_like(),
        sentencepiece_like(normalizers.NFKC()),
    ]
    return [(tokenizer, TokenCounts(tokenizer)) for tokenizer in tokenizers]


def composed(tokenizer: RustTokenizer) -> RustTokenizer:
    copy = RustTokenizer.from_str(tokenizer.to_str())
    copy.normalizer = normalizers.NFC()
    return copy


def stripping(tokenizer: RustTokenizer) -> RustTokenizer:
    copy = RustTokenizer.from_str(tokenizer.to_str())
    copy.add_special_tokens([AddedToken("<end>", special=True, normalized=False, lstrip=True, rstrip=True)])
    return copy


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("ab. \n\u2581e\u0301", max_size=200),
    st.lists(
        st.sampled_from(["<|im_end|>", "<end>", " ", "      ", "\n", "the", " a", "漢", "e\u0301", "K", "1"]),
        max_size=40,
    ).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
@example("<end>" + " " * 500)
@example("\u212b" * 50)
@example("\u2581" * 100)
@example(" " * 300)
@example("\x04" * 300)
@example("a\x04" * 300)
@example("\U00050000" * 300)
def test_no_text_has_fewer_tokens_than_the_bound_from_its_bytes(
    bounded: list[tuple[RustTokenizer, TokenCounts]], text: str
) -> None:
    for tokenizer, counts in bounded:
        assert counts.bytes_per_token is not None
        assert counts.least(text) <= len(tokenizer.encode(text).ids)


WORDS = st.lists(
    st.sampled_from(
        [
            "the",
            "in",
            "than",
            "on's",
            "12",
            "3.",
            "漢字",
            "naïve",
            "e\u0301",
            "<|im_end|>",
            "\t",
            "  ",
            "x",
            "a\x04b",
            "\x04",
        ]
    ),
    max_size=60,
).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(WORDS | st.text(max_size=80), st.integers(1, 60))
def test_a_text_has_as_many_tokens_as_its_beginning(
    bounded: list[tuple[RustTokenizer, TokenCounts]], text: str, least: int
) -> None:
    """Except for a marker that the cut may split."""
    for tokenizer, counts in bounded:
        at = counts.cut(text, least)
        if at is not None:
            assert least <= at < len(text)
            whole, beginning = tokenizer.encode(text).ids, tokenizer.encode(text[:at]).ids
            assert len(beginning) <= len(whole) + 1
            if "<" not in text:
                assert whole[: len(beginning)] == beginning


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("a1 \n漢-b", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(50, 150),
    st.floats(0.2, 0.9),
)
def test_elsewhere_a_cut_changes_few_tokens(
    bounded: list[tuple[RustTokenizer, TokenCounts]], parts: list[str], repeats: int, share: float
) -> None:
    text = "".join(part * repeats for part in parts)
    for tokenizer, _ in bounded:
        beginning = tokenizer.encode(text[: int(share * len(text))]).ids
        assert int(SURE_SHARE * len(beginning)) <= len(tokenizer.encode(text).ids)


def test_ordinary_text_is_cut_between_words(smol: RustTokenizer) -> None:
    text = "The quick brown fox, it's said, jumps over 12 lazy dogs. " * 20
    counts = TokenCounts(smol)
    for least in range(1, 300):
        at = counts.cut(text, least)
        assert at is not None
        assert at - least < 20


@pytest.mark.parametrize(
    "tokenizer",
    [
        RustTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        RustTokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        RustTokenizer(models.BPE({"a": 0}, [])),
    ],
    ids=["words", "one token for all that is unknown", "unknown text is dropped"],
)
def test_there_is_no_bound_if_one_token_may_represent_any_text(tokenizer: RustTokenizer) -> None:
    counts = TokenCounts(tokenizer)
    assert counts.least("b" * 10_000) == 0
    assert counts.cut("a b c d", 1) is None


def test_there_is_no_bound_if_white_space_is_dropped(byte_level: RustTokenizer) -> None:
    dropping = RustTokenizer.from_str(byte_level.to_str())
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert TokenCounts(dropping).least(" " * 10_000) == 0


def test_the_longest_token_of_the_real_model_is_known(smol: RustTokenizer) -> None:
    assert TokenCounts(smol).bytes_per_token == 81


def test_normalization_shortens_no_more_than_the_bound() -> None:
    def most(decompose: str) -> float:
        characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
        own = max(size(each) / size(unicodedata.normalize(decompose, each)) for each in characters)
        composing = max(size(unicodedata.normalize("NFD", each)) / size(each) for each in characters)
        return own * composing

    def size(text: str) -> int:
        return len(text.encode())

    assert most("NFD") <= COMPOSING["NFC"] == COMPOSING["NFD"]
    assert most("NFKD") <= COMPOSING["NFKC"] == COMPOSING["NFKD"]


@given(st.lists(st.integers(0, 319), max_size=30))
def test_byte_level_tokens_are_bytes(byte_level: RustTokenizer, ids: list[int]) -> None:
    tokens = [token for each in ids if (token := byte_level.id_to_token(each)) is not None and each > 2]
    text = b"".join(map(byte_level_bytes, tokens)).decode("utf-8", "replace")
    assert text == byte_level.decode(ids, skip_special_tokens=True)


def test_the_bound_of_a_long_text_is_immediate(byte_level: RustTokenizer, tmp_path: Path) -> None:
    """Only its size is used, so the text may be one that no tokenizer accepts."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.counts.least("\ud800" * 900_000) >= 2_700_000 // 20
