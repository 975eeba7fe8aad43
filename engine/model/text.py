"""Incremental detokenization: emits whole characters only, and finds stop strings that span tokens."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from engine.model.tokenizer import Tokenizer
from engine.model.vocabulary import byte_level_bytes, is_byte_token

CONTEXT_TOKENS = 6


class _Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that the next token, which is not special, completes."""

    def close(self) -> str:
        """The text that was held back."""


class _ByteLevel:
    """Byte-level tokenizers: decodes the tokens' bytes incrementally as UTF-8, invalid ones as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._decoder.decode(byte_level_bytes(token))

    def close(self) -> str:
        """The text of bytes that were held back, without an incomplete character."""
        pending, _ = self._decoder.getstate()
        return "" if _is_incomplete(pending) else pending.decode("utf-8", "replace")


def _is_incomplete(data: bytes) -> bool:
    """Whether bytes that a decoder holds back can become a character: one half of a surrogate pair cannot."""
    return len(data) < 2 or any(_is_utf_8(data + b"\x80" * more) for more in (1, 2))


def _is_utf_8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _InContext:
    """Other tokenizers: decodes each run of tokens together with the token before it, on which its text may depend.

    A run is one token, or consecutive tokens for single bytes, which form text only together.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        whole = [each for each in prompt_ids[-CONTEXT_TOKENS:] if self._is_whole(each)]
        self._context = whole[-1:]
        self._run: list[int] = []

    def _is_whole(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id)
        return token is not None and not is_byte_token(token) and not self._tokenizer.is_special(token_id)

    def push(self, token_id: int) -> str:
        self._run.append(token_id)
        if not self._is_whole(token_id):
            return ""
        text = self._decoded(self._run)
        self._context, self._run = [token_id], []
        return text

    def _decoded(self, run: list[int]) -> str:
        return self._tokenizer.decode([*self._context, *run])[len(self._tokenizer.decode(self._context)) :]

    def close(self) -> str:
        """The text of bytes that were held back, without an incomplete character at their end."""
        tokens = [self._tokenizer.token(token_id) for token_id in self._run]
        data = bytes(int(token[3:5], 16) for token in tokens if token is not None)
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(data)
        except UnicodeDecodeError:
            return self._decoded(self._run)


class TextStream:
    """Decodes token ids one at a time; `text` never ends inside a character.

    `text` equals decoding all tokens at once, without an incomplete character at the end and without special tokens. A
    stop string is searched for in `text`; one that contains the text of a special token is searched for in the text
    with special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: _Detokenizer = (
            _ByteLevel(tokenizer) if tokenizer.is_byte_level else _InContext(tokenizer, prompt_ids)
        )
        with_special = tokenizer.with_special(stop) if stop else ()
        self._stop = _StopStrings([each for each in stop if each not in with_special])
        self._raw_stop = _StopStrings(with_special)
        self._raw = ""
        self._hidden: list[tuple[int, int]] = []
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Append a token; True if a stop string is now complete, in which case `text` ends before it."""
        if not self._tokenizer.is_special(token_id):
            return self._append(self._detokenizer.push(token_id))
        return self._raw_stop.given and self._append_hidden(self._tokenizer.token(token_id) or "")

    def close(self) -> bool:
        """Append the text that was held back; True if that completes a stop string."""
        return self._append(self._detokenizer.close())

    def _append(self, new: str) -> bool:
        if not new:
            return False
        self.text += new
        ends = [self._stop.first_in(self.text, len(new))]
        if self._raw_stop.given:
            self._raw += new
            ends.append(self._shown(self._raw_stop.first_in(self._raw, len(new))))
        return self._end_at(ends)

    def _append_hidden(self, special: str) -> bool:
        self._hidden.append((len(self._raw), len(special)))
        self._raw += special
        return self._end_at([self._shown(self._raw_stop.first_in(self._raw, len(special)))])

    def _shown(self, raw: int | None) -> int | None:
        """Convert a position in the text with special tokens to the position in `text`."""
        if raw is None:
            return None
        return raw - sum(min(length, raw - at) for at, length in self._hidden if at < raw)

    def _end_at(self, ends: Sequence[int | None]) -> bool:
        found = [end for end in ends if end is not None]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


class _StopStrings:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, self._texts), default=0)
        self.given = bool(self._texts)

    def first_in(self, text: str, num_new: int) -> int | None:
        """Start of the first stop string that ends within the newest characters; None if there is none."""
        start = max(len(text) - num_new - self._longest + 1, 0)
        found = [at for each in self._texts if (at := text.find(each, start)) >= 0]
        return min(found, default=None)
