"""Incremental detokenization: emits whole characters only, and finds stop strings that span tokens."""

from collections.abc import Sequence

from engine.model.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
CONTEXT_TOKENS = 6
MAX_PENDING_TOKENS = 8


class TextStream:
    """Decodes token ids one at a time; `text` never ends inside a character.

    Each token is decoded together with a few preceding ones, because some tokenizers decode a token differently at the
    start of a text. For the first tokens these are the last tokens of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_emitted = len(self._window)
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Append a token; True if a stop string is now complete, in which case `text` ends before it."""
        self._window.append(token_id)
        emitted = self._tokenizer.decode(self._window[: self._num_emitted])
        whole = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._num_emitted
        if len(whole) <= len(emitted) or (whole.endswith(INCOMPLETE) and pending < MAX_PENDING_TOKENS):
            return False
        self._window = self._window[-max(pending, CONTEXT_TOKENS) :]
        self._num_emitted = len(self._window)
        return self._append(whole[len(emitted) :])

    def _append(self, new: str) -> bool:
        search_from = max(len(self.text) - self._longest_stop + 1, 0)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
