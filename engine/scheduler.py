"""Which sequences compute how many tokens in the next step. Policy only: no tensors, no clock.

Running sequences go first, oldest first, then waiting ones in order of arrival, under a budget of tokens; a long prompt
is computed in chunks. When pages run out the youngest running sequence gives all of its pages back and starts over.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engine.memory.pool import PagePool
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_tokens` tokens of a sequence, computed in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True when the step leaves no token uncomputed, so that the next one can be sampled."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


class Scheduler:
    """Continuous batching over a page pool: sequences come and go between any two steps."""

    def __init__(self, pool: PagePool, tokens_per_page: int, max_batch_size: int, max_batch_tokens: int) -> None:
        self._pool = pool
        self._tokens_per_page = tokens_per_page
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self._tokens_per_page)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that could fit into the pool if it were alone."""
        assert self.pages_for(sequence.max_tokens) <= self._pool.num_pages
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._pool.release(sequence.request_id)

    def plan(self) -> list[Slice]:
        """Slices of the next step, with pages for all of their tokens; empty only when there is no sequence."""
        before = self.num_preemptions
        plan: list[Slice] = []
        budget = self._max_batch_tokens
        for sequence in list(self._running):
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            if count > 0 and sequence in self._running and self._grow(sequence, sequence.num_computed + count):
                plan.append(Slice(sequence, count))
                budget -= count
        while budget > 0 and self.num_preemptions == before and self._admit():
            count = min(self._running[-1].num_tokens, budget)
            plan.append(Slice(self._running[-1], count))
            budget -= count
        return plan

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages up to `num_tokens`, preempting from the youngest on; False when it had to give way itself."""
        missing = self.pages_for(num_tokens) - len(self._pool.pages_of(sequence.request_id))
        while missing > self._pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._pool.take(sequence.request_id, max(missing, 0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.request_id)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self) -> bool:
        """Let the oldest waiting sequence run if all its present tokens find pages, one spare for each that runs."""
        if not self._waiting or len(self._running) >= self._max_batch_size:
            return False
        pages = self.pages_for(self._waiting[0].num_tokens)
        if pages + len(self._running) > self._pool.num_free:
            return False
        sequence = self._waiting.popleft()
        self._pool.take(sequence.request_id, pages)
        self._running.append(sequence)
        return True
