"""The progress of a request: its tokens, text and timing, and finally its output."""

import time
from collections.abc import Set

from engine.errors import EngineError
from engine.model.text import TextStream
from engine.model.tokenizer import Tokenizer
from engine.scheduling.sequence import Sequence
from engine.types import FinishReason, Output, Sampled, Usage


class RequestState:
    """An unfinished request: its sequence, text and log-probabilities. `began_at` is when it began."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, began_at: float) -> None:
        self.sequence = sequence
        self._text = TextStream(tokenizer, sequence.prompt_ids, sequence.sampling.stop)
        self._began_at = began_at
        self._first_token_s: float | None = None
        self._logprobs: list[dict[int, float]] | None = None if sequence.sampling.logprobs is None else []

    def advance(self, sampled: Sampled, end_ids: Set[int]) -> FinishReason | None:
        """Append a sampled token; returns the finish reason if the request ends with it."""
        sequence = self.sequence
        sequence.output_ids.append(sampled.token_id)
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._began_at
        if self._logprobs is not None and sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
        if self._text.push(sampled.token_id):
            return "stop"
        if sampled.token_id in end_ids and not sequence.sampling.ignore_eos:
            self._text.close()
            return "stop"
        if sequence.num_tokens < sequence.max_tokens:
            return None
        return "stop" if self._text.close() else "length"

    def output(self, reason: FinishReason, error: EngineError | None = None) -> Output:
        """The output of the finished request; with `error` the request failed."""
        sequence = self.sequence
        return Output(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.output_ids),
            text=self._text.text,
            finish_reason=reason,
            usage=Usage(len(sequence.prompt_ids), sequence.num_cached or 0, len(sequence.output_ids)),
            logprobs=self._logprobs,
            first_token_s=self._first_token_s,
            error=error,
        )
