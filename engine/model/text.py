"""Text of a growing sequence: whole characters only, ended by a stop string wherever tokens cut it."""

from collections.abc import Sequence

from engine.model.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
CONTEXT_TOKENS = 6
MAX_PENDING_TOKENS = 8


class TextStream:
    """Turns token ids into text one at a time; `text` never ends inside a character.

    A few tokens before the newest are decoded along with it, since some tokenizers write a token differently at the
    start of a text; at first these are the prompt's last ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_shown = len(self._window)
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Take the next token; True when a stop string is complete, which `text` then ends before."""
        self._window.append(token_id)
        shown = self._tokenizer.decode(self._window[: self._num_shown])
        whole = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._num_shown
        if len(whole) <= len(shown) or (whole.endswith(INCOMPLETE) and pending < MAX_PENDING_TOKENS):
            return False
        self._window = self._window[-max(pending, CONTEXT_TOKENS) :]
        self._num_shown = len(self._window)
        return self._append(whole[len(shown) :])

    def _append(self, new: str) -> bool:
        search_from = max(len(self.text) - self._longest_stop + 1, 0)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
