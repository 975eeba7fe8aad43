"""Keeps the markers of a conversation the template's own: what somebody wrote into a message is text, never a token.

A tokenizer turns the text of an added token, such as `<|im_end|>`, into that token wherever it stands. So each one that
came from a message gets a separator after its first character: a token of its own, unknown to everybody else, at which
the tokenizer cuts and whose id is dropped afterwards. Text without such markers is tokenized as ever.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from engine.errors import InvalidRequestError

PRIVATE_USE = range(0xE000, 0xF900)
MARK_CHARACTERS = 8
"""Of a private-use area of 6,400 characters: 101 bits, so nobody can write one that was not told."""

Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], str]


def _secret_mark() -> str:
    return "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(MARK_CHARACTERS))


class ControlTokens:
    """The texts of a tokenizer's added tokens, and how to keep them from being one in text that may not hold any.

    Tokens of one character or of white space are no markers and stay what they are.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._markers = sorted({each for each in texts if len(each) > 1 and not each.isspace()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._codes = {marker: chr(PRIVATE_USE[at % len(PRIVATE_USE)]) for at, marker in enumerate(self._markers)}
        self.separator = _secret_mark()
        self._open, self._close = _secret_mark(), _secret_mark()
        self._mark = re.compile(f"(?:({self._open})|{self._close})(.)", re.DOTALL)

    def count(self, text: str) -> int:
        """Markers in a text."""
        return sum(1 for _ in self._pattern.finditer(text))

    def separated(self, text: str) -> str:
        """The text with a separator inside each marker, those that overlap included."""
        parts, done, found = [], 0, self._pattern.search(text)
        while found is not None:
            inside = found.start() + 1
            parts += [text[done:inside], self.separator]
            done, found = inside, self._pattern.search(text, inside)
        return "".join([*parts, text[done:]]) if parts else text

    def rendered(self, messages: Messages, render: Render) -> str:
        """The conversation as `render` writes it, with a separator inside each marker that came from a message.

        Without separators it is the same text as ever if any way of marking lets the template do the same: a template
        may look for a marker, cut there, or strip what stands around it. If none does, the markers are cut beforehand.
        """
        plain = render(messages)
        values = [value for message in messages for value in message.values() if self._pattern.search(value)]
        if not values:
            return plain
        marks = (self.separated, self._marked_before, self._marked_after, self._marked_around)
        for mark in marks[:1] if any(map(self._overlap, values)) else marks:
            marked = _attempt(_with(messages, mark), render)
            if marked is not None and self._unmarked(marked) == plain:
                return self._moved_inside(marked)
        return render(_with(messages, self.separated))

    def _overlap(self, text: str) -> bool:
        """Whether a marker begins inside another, so that a mark at its edge would not reach both."""
        return self.separated(text).count(self.separator) > self.count(text)

    def _marked_before(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._opening(found[0]) + found[0], text)

    def _marked_after(self, text: str) -> str:
        return self._pattern.sub(lambda found: found[0] + self._closing(found[0]), text)

    def _marked_around(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._opening(found[0]) + found[0] + self._closing(found[0]), text)

    def _opening(self, marker: str) -> str:
        return self._open + self._codes[marker]

    def _closing(self, marker: str) -> str:
        return self._close + self._codes[marker]

    def _unmarked(self, text: str) -> str:
        return self._mark.sub("", text).replace(self.separator, "")

    def _moved_inside(self, text: str) -> str:
        """Separators in place of marks. A mark whose marker the template took away says nothing of what is there."""
        result, done = "", 0
        for mark in self._mark.finditer(text):
            result, done = result + text[done : mark.start()], mark.end()
            if mark[1]:
                marker = self._pattern.match(text, done)
                if marker is not None and self._codes[marker[0]] == mark[2]:
                    result, done = f"{result}{text[done]}{self.separator}", done + 1
            elif any(result.endswith(marker) for marker, code in self._codes.items() if code == mark[2]):
                result = f"{result[:-1]}{self.separator}{result[-1]}"
        return result + text[done:]


def _with(messages: Messages, mark: Callable[[str], str]) -> list[dict[str, str]]:
    return [{name: mark(value) for name, value in message.items()} for message in messages]


def _attempt(messages: Messages, render: Render) -> str | None:
    try:
        return render(messages)
    except InvalidRequestError:
        return None
