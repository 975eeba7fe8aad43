"""Module patterns of adapter_config.json, matched as PEFT does but in bounded time.

Adapters are untrusted, and `re` backtracks without limit: `(a|a)*b` can block a process indefinitely. So `re` only
parses an expression. Matching works on sets of positions: each node maps its possible starts to its possible ends.
"""

import re
from collections.abc import Iterable
from re import _constants as op  # type: ignore[attr-defined]  # the parser's vocabulary; typeshed knows its old name only
from re import _parser as parser  # type: ignore[attr-defined]  # as above
from typing import Any

from engine.errors import AdapterError

MAX_LENGTH = 1024

Positions = frozenset[int]


class ModulePattern:
    """A regular expression over module names; raises AdapterError naming `field` if it is malformed."""

    def __init__(self, expression: str, field: str) -> None:
        self.expression, self.field = expression, field
        if len(expression) > MAX_LENGTH:
            raise AdapterError(f"{field} has {len(expression)} characters; an expression has at most {MAX_LENGTH}")
        try:
            self._tree = parser.parse(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"{field}: {expression!r} is not a regular expression: {error}") from error
        if self._tree.state.flags & ~re.UNICODE:
            raise AdapterError(f"{field}: {expression!r} sets flags, which are not supported; remove them")

    def matches(self, module: str) -> bool:
        """True if the whole name matches, as for target_modules."""
        return self._reaches_end(module, frozenset({0}))

    def matches_ending(self, module: str) -> bool:
        """True if the whole name or a suffix of its dotted parts matches, as for keys of rank_pattern."""
        return self._reaches_end(module, frozenset({0} | {at + 1 for at, char in enumerate(module) if char == "."}))

    def _reaches_end(self, module: str, starts: Positions) -> bool:
        try:
            return len(module) in _ends(self._tree, module, starts)
        except (NotImplementedError, RecursionError) as error:
            raise AdapterError(
                f"{self.field}: {self.expression!r} uses an unsupported feature; list the module names instead"
            ) from error


def ends_with(module: str, names: Iterable[str]) -> bool:
    """True if one of the names is the module's name or a suffix of its dotted parts."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _ends(tree: Iterable[tuple[Any, Any]], text: str, starts: Positions) -> Positions:
    for code, argument in tree:
        if not starts:
            break
        starts = _node_ends(code, argument, text, starts)
    return starts


def _node_ends(code: Any, argument: Any, text: str, starts: Positions) -> Positions:
    if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
        return frozenset(at + 1 for at in starts if at < len(text) and _accepts(code, argument, text[at]))
    if code is op.BRANCH:
        return frozenset().union(*(_ends(tree, text, starts) for tree in argument[1]))
    if code is op.SUBPATTERN and not argument[1] and not argument[2]:
        return _ends(argument[3], text, starts)
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        minimum, maximum, tree = argument
        return _repeat_ends(minimum, maximum, tree, text, starts)
    if code in (op.ASSERT, op.ASSERT_NOT) and argument[0] == 1:
        expected = code is op.ASSERT
        return frozenset(at for at in starts if bool(_ends(argument[1], text, frozenset({at}))) is expected)
    if code is op.AT:
        return frozenset(at for at in starts if _holds(argument, text, at))
    raise NotImplementedError(code)


def _repeat_ends(minimum: int, maximum: int, tree: Any, text: str, starts: Positions) -> Positions:
    """Positions never decrease, so both loops end within the length of the text for any bounds."""
    for _ in range(minimum):
        after = _ends(tree, text, starts)
        if after == starts:
            break
        starts = after
    reached, fresh, count = starts, starts, minimum
    while fresh and count < maximum:
        fresh = _ends(tree, text, fresh) - reached
        reached |= fresh
        count += 1
    return reached


def _accepts(code: Any, argument: Any, char: str) -> bool:
    if code is op.ANY:
        return char != "\n"
    if code is not op.IN:
        return (chr(argument) == char) is (code is op.LITERAL)
    negated = argument[0][0] is op.NEGATE
    return any(_in_set(item, value, char) for item, value in argument[negated:]) is not negated


def _in_set(item: Any, value: Any, char: str) -> bool:
    if item is op.LITERAL:
        return chr(value) == char
    if item is op.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    categories = {
        op.CATEGORY_DIGIT: char.isdigit(),
        op.CATEGORY_NOT_DIGIT: not char.isdigit(),
        op.CATEGORY_WORD: _is_word(char),
        op.CATEGORY_NOT_WORD: not _is_word(char),
        op.CATEGORY_SPACE: char.isspace(),
        op.CATEGORY_NOT_SPACE: not char.isspace(),
    }
    return categories[value]


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _holds(anchor: Any, text: str, at: int) -> bool:
    if anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        return at == 0
    if anchor in (op.AT_END, op.AT_END_STRING):
        return at == len(text)
    before, after = (at > 0 and _is_word(text[at - 1])), (at < len(text) and _is_word(text[at]))
    return (before is not after) is (anchor is op.AT_BOUNDARY)
