"""Prevents control-token injection: only the chat template can write control tokens, messages cannot.

A marker is the text of an added token, such as `<|im_end|>`. A tokenizer turns every marker into its token, also inside
a message. So each marker from a message gets a separator after its first character. The separator is a random token
that no client knows; the tokenizer splits the marker there, and the separator's id is dropped afterwards. Text without
markers is tokenized unchanged.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from engine.errors import InvalidRequestError

PRIVATE_USE = range(0xE000, 0xF900)
MARK_CHARACTERS = 8
"""Characters of a secret mark, from a private-use area of 6,400: 101 bits, so that no client can guess one."""

Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], str]


def _secret_mark() -> str:
    return "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(MARK_CHARACTERS))


class ControlTokens:
    """The markers of a tokenizer, and the separators that keep them from becoming tokens.

    Added tokens of one character, or of white space only, are not markers: they remain tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._markers = sorted({each for each in texts if len(each) > 1 and not each.isspace()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._codes = {marker: chr(PRIVATE_USE[at % len(PRIVATE_USE)]) for at, marker in enumerate(self._markers)}
        self.separator = _secret_mark()
        self._open, self._close = _secret_mark(), _secret_mark()
        self._mark = re.compile(f"(?:({self._open})|{self._close})(.)", re.DOTALL)

    def count(self, text: str) -> int:
        """Number of markers in a text."""
        return sum(1 for _ in self._pattern.finditer(text))

    def separated(self, text: str) -> str:
        """The text with a separator inside each marker, including overlapping ones."""
        parts, done, found = [], 0, self._pattern.search(text)
        while found is not None:
            inside = found.start() + 1
            parts += [text[done:inside], self.separator]
            done, found = inside, self._pattern.search(text, inside)
        return "".join([*parts, text[done:]]) if parts else text

    def rendered(self, messages: Messages, render: Render) -> str:
        """The conversation as `render` writes it, with a separator inside each marker from a message.

        A template may search for a marker, cut the text there, or strip white space around it, and a separator would
        change that. So several ways of marking are tried; the first is used with which the template renders the same
        text as without marks. If there is none, the template gets messages whose markers have separators.
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
        """Replace marks with separators inside their markers. Drop a mark whose marker the template has removed."""
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
