"""Which sequences compute how many tokens in the next step. Policy only: no tensors, no clock.

Running sequences go first, oldest first, then waiting ones in order of arrival, under a budget of tokens; a long prompt
is computed in chunks. When pages run out, idle adapters and idle blocks of the prefix cache go; then the youngest
running sequence gives its pages back and starts over.

A sequence without room for its adapter lets others pass for a bounded number of steps. Then nobody passes any more, and
running sequences give way to it, each at most once in its life.

An adapter that is not in the pool is asked for as soon as there are pages for it, also for sequences whose turn has not
come. While it is on its way its sequences compute nothing, take no place in the batch, and hold up nobody; the transfer
counts as a user of the adapter, so that its pages are nobody else's.

The queue tells what is needed next: idle adapters that waiting sequences want give way last, the first one's last of
all, and none is sent for in place of one that is wanted sooner. As far as the queue is known that is Belady's rule (IBM
Systems Journal 5 (2), 1966).
"""

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from engine.memory.pool import AdapterPages, BlockPage, PagePool
from engine.memory.residency import Residency, Resident
from engine.scheduling.sequence import Sequence
from engine.types import AdapterName

PATIENCE_STEPS = 64
LOOK_AHEAD = 64
"""Waiting sequences that are considered in one step."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_tokens` tokens of a sequence, computed in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True when the step leaves no token uncomputed, so that the next one can be sampled."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: slices to compute now, and adapters to send on their way into the pages taken for them."""

    slices: list[Slice]
    loads: list[AdapterName]


class _Verdict(Enum):
    ADMITTED = auto()
    NO_ROOM = auto()
    NO_ROOM_FOR_ADAPTER = auto()


class Scheduler:
    """Continuous batching over a page pool: sequences come and go between any two steps."""

    def __init__(
        self,
        pool: PagePool,
        residency: Residency,
        tokens_per_page: int,
        max_batch_size: int,
        max_batch_tokens: int,
        *,
        prefix_cache: bool,
    ) -> None:
        self._pool = pool
        self._residency = residency
        self._tokens_per_page = tokens_per_page
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._prefix_cache = prefix_cache
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._loads: list[AdapterName] = []
        self._arriving: set[AdapterName] = set()
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
        """Queue a sequence that could fit into the pool, with its adapter, if it were alone."""
        assert self.pages_for(sequence.max_tokens) + sequence.adapter_num_pages <= self._pool.num_pages
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    @property
    def arriving(self) -> Set[AdapterName]:
        """Adapters that were asked for and have not arrived."""
        return self._arriving

    def arrived(self, name: AdapterName) -> None:
        """An adapter's transfer has ended; from now on it is its sequences that hold it."""
        self._arriving.remove(name)
        self._residency.let_go(AdapterPages(name))

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence.adapter is None or sequence.adapter not in self._arriving

    def plan(self) -> Plan:
        """The next step, with pages for all of its tokens; without slices only when nothing is ready to compute."""
        self._loads = []
        wanted = self._wanted()
        self._residency.put_last(reversed(wanted))
        self._make_way()
        before = self.num_preemptions
        slices: list[Slice] = []
        budget = self._max_batch_tokens
        for sequence in [running for running in self._running if self._is_ready(running)]:
            if len(slices) == self._max_batch_size:
                break
            count = min(sequence.num_tokens - sequence.num_computed, budget)
            if count > 0 and sequence in self._running and self._grow(sequence, sequence.num_computed + count):
                slices.append(Slice(sequence, count))
                budget -= count
        if self.num_preemptions == before:
            self._admit_waiting(slices, budget)
            self._look_ahead(wanted)
        return Plan(slices, self._loads)

    def computed(self, part: Slice) -> None:
        """A slice's keys and values are in its pages; blocks that are full now can be shared."""
        sequence = part.sequence
        sequence.num_computed += part.num_tokens
        if self._prefix_cache:
            while (sequence.num_shared + 1) * self._tokens_per_page <= sequence.num_computed:
                self._share_next(sequence)

    def _share_next(self, sequence: Sequence) -> None:
        """Hand the first of a sequence's own blocks to the prefix cache, or take the equal one that is there."""
        index = sequence.num_shared
        page = sequence.pages[index]
        block = BlockPage(sequence.key(index, self._tokens_per_page))
        if block in self._residency:
            self._pool.give_back(page, sequence.owner)
            (sequence.pages[index],) = self._pool.pages_of(block)
            self._residency.hold(block)
        else:
            self._pool.hand_over(page, sequence.owner, block)
            self._residency.admit(block)
        sequence.num_shared += 1

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take pages up to `num_tokens`, preempting from the youngest on; False when it had to give way itself.

        Pages of adapters that are on their way come free by themselves: it waits for these rather than give way.
        """
        missing = max(self.pages_for(num_tokens) - len(sequence.pages), 0)
        while missing > self._residency.num_available:
            victim = self._running[-1]
            if victim is sequence and self._arriving:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing:
            sequence.pages += self._residency.take(sequence.owner, missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Let go of all that a running sequence uses; a prefix's end goes to the line before its beginning."""
        self._pool.release(sequence.owner)
        for index in reversed(range(sequence.num_shared)):
            self._residency.let_go(BlockPage(sequence.key(index, self._tokens_per_page)))
        if (adapter := sequence.adapter_owner) is not None:
            self._residency.let_go(adapter)
        sequence.pages, sequence.num_shared = [], 0

    def _wanted(self) -> dict[AdapterPages, Sequence]:
        """Adapters of waiting sequences, each with the first that wants it, in the order of these."""
        wanted: dict[AdapterPages, Sequence] = {}
        for sequence in islice(self._waiting, LOOK_AHEAD):
            if (owner := sequence.adapter_owner) is not None:
                wanted.setdefault(owner, sequence)
        return wanted

    def _make_way(self) -> None:
        """For the first sequence whose patience is over: preempt the youngest until it fits, or none is left to ask."""
        overdue = next((s for s in islice(self._waiting, LOOK_AHEAD) if s.waited_steps > PATIENCE_STEPS), None)
        if overdue is None or len(self._running) >= self._max_batch_size:
            return
        while self._try_admit(overdue) is not _Verdict.ADMITTED:
            victim = next((s for s in reversed(self._running) if not s.has_yielded), None)
            if victim is None:
                return
            victim.has_yielded = True
            self._preempt(victim)

    def _admit_waiting(self, slices: list[Slice], budget: int) -> None:
        """Let waiting sequences run, oldest first, as far as tokens, sequences and pages go.

        As many as fit into a batch wait among the running ones for adapters on their way.
        """
        num_ready = sum(self._is_ready(sequence) for sequence in self._running)
        for sequence in list(islice(self._waiting, LOOK_AHEAD)):
            is_there = self._is_there(sequence)
            if is_there and (budget <= 0 or num_ready >= self._max_batch_size):
                return
            if not is_there and len(self._running) - num_ready >= self._max_batch_size:
                continue
            match self._try_admit(sequence):
                case _Verdict.ADMITTED if self._is_ready(sequence):
                    num_ready += 1
                    count = min(sequence.num_tokens - sequence.num_computed, budget)
                    slices.append(Slice(sequence, count))
                    budget -= count
                case _Verdict.ADMITTED:
                    pass
                case _Verdict.NO_ROOM_FOR_ADAPTER if sequence.waited_steps <= PATIENCE_STEPS:
                    sequence.waited_steps += 1
                case _:
                    return

    def _is_there(self, sequence: Sequence) -> bool:
        owner = sequence.adapter_owner
        return owner is None or (owner in self._residency and owner.name not in self._arriving)

    def _look_ahead(self, wanted: dict[AdapterPages, Sequence]) -> None:
        """Send for adapters of sequences that cannot run yet, as far as that takes nothing from those that run.

        An idle adapter that is wanted gives way only to one that is wanted sooner and for the next batch, and nobody
        passes a sequence whose patience is over.
        """
        num_sooner = 0
        num_wanted = sum(self._residency.num_idle_pages_of(owner) for owner in wanted)
        for rank, (owner, sequence) in enumerate(wanted.items()):
            if len(self._arriving) >= self._max_batch_size or sequence.waited_steps > PATIENCE_STEPS:
                return
            num_kept = num_sooner if rank < self._max_batch_size else num_wanted
            num_pages = sequence.adapter_num_pages + self.pages_for(sequence.num_tokens) + len(self._running)
            if owner not in self._residency and num_pages + num_kept <= self._residency.num_available:
                self._send_for(owner, sequence.adapter_num_pages)
            num_sooner += self._residency.num_idle_pages_of(owner)

    def _send_for(self, adapter: AdapterPages, num_pages: int) -> None:
        """Take an adapter's pages; until it has arrived its transfer is their user."""
        self._residency.take(adapter, num_pages)
        self._residency.admit(adapter)
        self._arriving.add(adapter.name)
        self._loads.append(adapter.name)

    def _try_admit(self, sequence: Sequence) -> _Verdict:
        """Take pages for all present tokens and the adapter, if one spare page is left for each that runs."""
        blocks = self._cached_blocks(sequence)
        adapter = sequence.adapter_owner
        is_cold = adapter is not None and adapter not in self._residency
        held: list[Resident] = [*blocks] if adapter is None or is_cold else [*blocks, adapter]
        for owner in held:
            self._residency.hold(owner)
        wanted = self.pages_for(sequence.num_tokens) - len(blocks)
        room = self._residency.num_available - len(self._running) - wanted
        if room < (sequence.adapter_num_pages if is_cold else 0):
            for owner in reversed(held):
                self._residency.let_go(owner)
            return _Verdict.NO_ROOM if room < 0 else _Verdict.NO_ROOM_FOR_ADAPTER
        if adapter is not None and is_cold:
            self._send_for(adapter, sequence.adapter_num_pages)
            self._residency.hold(adapter)
        self._start(sequence, blocks, wanted)
        return _Verdict.ADMITTED

    def _start(self, sequence: Sequence, blocks: list[BlockPage], num_own_pages: int) -> None:
        sequence.pages = [page for block in blocks for page in self._pool.pages_of(block)]
        sequence.pages += self._residency.take(sequence.owner, num_own_pages)
        sequence.num_shared = len(blocks)
        sequence.num_computed = len(blocks) * self._tokens_per_page
        sequence.waited_steps = 0
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def _cached_blocks(self, sequence: Sequence) -> list[BlockPage]:
        """The sequence's leading blocks that are in the pool; its last token is always computed."""
        blocks: list[BlockPage] = []
        if self._prefix_cache:
            for index in range((sequence.num_tokens - 1) // self._tokens_per_page):
                block = BlockPage(sequence.key(index, self._tokens_per_page))
                if block not in self._residency:
                    break
                blocks.append(block)
        return blocks
