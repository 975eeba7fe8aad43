"""Analyses a tokenizer: the bytes of its tokens, and lower bounds on the number of tokens of a text."""

import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPOSING = {"NFC": 9.0, "NFD": 9.0, "NFKC": 12.0, "NFKD": 12.0}
"""By how much Unicode normalization can shorten a text's UTF-8: 3 or 4 times a character's own mapping, and 3 times
by composition (tests/engine/model/test_vocabulary.py computes both from the Unicode database)."""
UTF_8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that occur in UTF-8."""
SPLITTING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
LOOKED_AT_CHARACTERS = 4096
"""How many characters are searched for a position to cut at."""


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet, in which byte-level tokenizers write bytes: printable ones as they are, others from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _as_latin_1() -> dict[int, int]:
    return {ord(character): byte for character, byte in _byte_of_character().items()}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token in a byte-level tokenizer; a token with a character outside the alphabet is UTF-8."""
    try:
        return token.translate(_as_latin_1()).encode("latin-1") if _is_alphabetic(token) else token.encode()
    except UnicodeEncodeError:
        return token.encode()


def _is_alphabetic(token: str) -> bool:
    return _byte_of_character().keys() >= set(token)


def is_byte_token(token: str) -> bool:
    """Whether a token such as `<0xF0>` represents one byte."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def component(part: Any) -> dict[str, Any]:
    """A normalizer, pre-tokenizer or decoder as written in tokenizer.json; empty if there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def parts_of(state: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The members of a sequence, whose field is `name`, or the one part itself."""
    if not state:
        return []
    if state.get("type") != "Sequence":
        return [dict(state)]
    return [each for member in state[name] for each in parts_of(member, name)]


class TokenCounts:
    """Lower bounds on the number of tokens of a text, from its size and from its beginning.

    `bytes_per_token` is the largest number of bytes that one token can represent. None if there is no such bound: the
    tokenizer drops white space, or writes a single token for unknown text of any length.
    """

    def __init__(self, tokenizer: Any) -> None:
        normalizers = parts_of(component(tokenizer.normalizer), "normalizers")
        splitters = parts_of(component(tokenizer.pre_tokenizer), "pretokenizers")
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in [*splitters, *normalizers])
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder().values()
        pieces = [
            *(each for token in vocabulary for each in self._spellings(token)),
            *(t.content.encode() for t in added),
        ]
        shrinking = math.prod(map(_shrinking, normalizers))
        unspelt = self._unspelt(tokenizer, vocabulary)
        sound = shrinking < math.inf and all(map(_keeps_text, splitters)) and unspelt is not None
        self.bytes_per_token = math.ceil(max(map(len, pieces)) * shrinking) if sound else None
        self._composes = any(part["type"] in COMPOSING for part in normalizers)
        self._stripping = tuple(token.content for token in added if token.lstrip or token.rstrip)
        self._dropped = unspelt or b""
        self._adjacent = _adjacent_bytes(pieces)
        self._adjacent[:, list(self._dropped)] = True

    def _spellings(self, token: str) -> list[bytes]:
        """The texts, as bytes, that a token can represent: U+2581 is either a space or itself."""
        if self._is_byte_level:
            return [byte_level_bytes(token)]
        if is_byte_token(token):
            return [b"\0"]
        return [token.encode(), token.replace("\u2581", " ").encode()] if "\u2581" in token else [token.encode()]

    def _unspelt(self, tokenizer: Any, vocabulary: Mapping[str, int]) -> bytes | None:
        """The bytes of UTF-8 that have no token and are dropped; None if unknown text is not spelt byte by byte."""
        model = tokenizer.model
        if type(model).__name__ == "BPE" and self._is_byte_level:
            return bytes(
                byte for token, byte in _byte_of_character().items() if token not in vocabulary and byte in UTF_8
            )
        spells_all = vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in UTF_8}
        return b"" if spells_all and getattr(model, "byte_fallback", False) else None

    def least(self, text: str) -> int:
        """A lower bound on the number of tokens, from the size of the text alone; 0 if there is no bound."""
        if self.bytes_per_token is None:
            return 0
        if any(token in text for token in self._stripping):  # these tokens absorb adjacent white space
            text = "".join(text.split())
        data = text.encode("utf-8", "surrogatepass")
        if any(byte in data for byte in self._dropped):
            data = data.translate(None, self._dropped)
        return -(-len(data) // self.bytes_per_token)

    def cut(self, text: str, least: int) -> int | None:
        """A position of at least `least` characters at which the text can be cut; None if there is none nearby.

        No token and no splitting rule spans this position. So the text before it has at most as many tokens on its own
        as within the whole text, plus one if the cut splits a marker.
        """
        if self.bytes_per_token is None:
            return None
        for at in range(least, min(least + LOOKED_AT_CHARACTERS, len(text))):
            if self._is_seam(text[at - 1], text[at]):
                return at
        return None

    def _is_seam(self, left: str, right: str) -> bool:
        if not left.isalpha() or (self._composes and not right.isascii()):
            return False
        return not self._adjacent[_utf8(left)[-1], _utf8(right)[0]]


def _utf8(character: str) -> bytes:
    return character.encode("utf-8", "surrogatepass")


def _shrinking(normalizer: Mapping[str, Any]) -> float:
    """The largest factor by which a normalizer can shorten a text's UTF-8."""
    kind = normalizer["type"]
    if kind in ("Prepend", "ByteLevel"):
        return 1.0
    if kind == "Replace" and (pattern := normalizer["pattern"].get("String")) and normalizer["content"]:
        return max(1.0, len(pattern.encode()) / len(normalizer["content"].encode()))
    return COMPOSING.get(kind, math.inf)


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in SPLITTING and splitter.get("behavior") != "Removed"


def _adjacent_bytes(pieces: Iterable[bytes]) -> NDArray[np.bool_]:
    """Whether byte j follows byte i in any piece."""
    pieces = list(pieces)
    data = np.frombuffer(b"".join(pieces), np.uint8)
    ends = np.cumsum([len(piece) for piece in pieces])
    inside = np.ones(len(data), bool)
    inside[ends[ends > 0] - 1] = False
    inside = inside[:-1]
    adjacent = np.zeros((256, 256), bool)
    adjacent[data[:-1][inside], data[1:][inside]] = True
    return adjacent
