"""Continuous batching: which sequences compute how many tokens in the next step. Policy only: no tensors, no clock.

Running sequences are scheduled first, oldest first, then waiting ones in order of arrival, within a token budget. A
long prompt is computed in chunks. When pages run out, idle adapters and idle prefix-cache blocks are evicted; if that
is not enough, the youngest running sequence is preempted: it frees its pages and is computed again later.

If there is no room for a sequence's adapter, later sequences may overtake it for a bounded number of steps. After that
no sequence overtakes it, and running sequences are preempted to make room, each at most once for this reason.

The scheduler asks for an adapter as soon as there are pages for it, including for sequences further back in the queue.
While the adapter is loading, its sequences compute nothing, take no place in the batch and do not delay others. The
load counts as a user of the adapter, so its pages cannot be evicted.

The queue shows which adapters are needed next. Idle adapters that waiting sequences need are evicted last, the one
needed first at the very end, and no adapter is loaded in place of one that is needed sooner. As far as the queue is
known, this is Belady's rule (IBM Systems Journal 5 (2), 1966). `expect` extends the known queue beyond the sequences
that were added.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from engine.memory.pool import AdapterPages, BlockPage, PagePool
from engine.memory.residency import Residency, Resident
from engine.scheduling.sequence import Sequence
from engine.types import AdapterName

MAX_WAITED_STEPS = 64
"""Steps for which others may overtake a sequence that has no room for its adapter."""
LOOK_AHEAD = 64
"""Waiting sequences considered in one step."""
MAX_EXPECTED = 256
"""Adapters whose order of need is remembered."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_tokens` tokens of a sequence, computed in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """True if the step computes the sequence's last known token, so that the next one can be sampled."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: slices to compute now, and adapters to start loading into the pages allocated for them."""

    slices: list[Slice]
    loads: list[AdapterName]


class _Admission(Enum):
    ADMITTED = auto()
    NO_ROOM = auto()
    NO_ROOM_FOR_ADAPTER = auto()


class Scheduler:
    """Continuous batching over a page pool; sequences may be added and removed between any two steps."""

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
        self._loading: set[AdapterName] = set()
        self._expected: Many[AdapterPages] = ()
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
        """Queue a sequence; it must fit into an otherwise empty pool together with its adapter."""
        assert self.pages_for(sequence.max_tokens) + sequence.adapter_num_pages <= self._pool.num_pages
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and free its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def expect(self, adapters: Iterable[AdapterName]) -> None:
        """Adapters that sequences not yet added will need, the one needed first first; replaces the last list."""
        self._expected = tuple(map(AdapterPages, islice(adapters, MAX_EXPECTED)))

    @property
    def loading(self) -> Set[AdapterName]:
        """Adapters whose load has been requested and has not finished."""
        return self._loading

    def load_finished(self, name: AdapterName) -> None:
        """An adapter's load has finished or failed; from now on only its sequences keep it in the pool."""
        self._loading.remove(name)
        self._residency.release(AdapterPages(name))

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence.adapter is None or sequence.adapter not in self._loading

    def plan(self) -> Plan:
        """Plan the next step and allocate pages for its tokens; no slices only if nothing is ready to compute."""
        self._loads = []
        needed = self._needed_adapters()
        self._residency.evict_last(reversed(self._expected))
        self._residency.evict_last(reversed(needed))
        self._preempt_for_overdue()
        self._displace()
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
            self._prefetch_adapters(needed)
        return Plan(slices, self._loads)

    def computed(self, part: Slice) -> None:
        """Record that a slice's keys and values are in its pages, and share the blocks that are now full."""
        sequence = part.sequence
        sequence.num_computed += part.num_tokens
        if self._prefix_cache:
            while (sequence.num_shared + 1) * self._tokens_per_page <= sequence.num_computed:
                self._share_next(sequence)

    def _share_next(self, sequence: Sequence) -> None:
        """Move a sequence's first unshared block to the prefix cache, or use the cache's copy if it has one."""
        index = sequence.num_shared
        page = sequence.pages[index]
        block = BlockPage(sequence.key(index, self._tokens_per_page))
        if block in self._residency:
            self._pool.release_page(page, sequence.owner)
            (sequence.pages[index],) = self._pool.pages_of(block)
            self._residency.acquire(block)
        else:
            self._pool.transfer(page, sequence.owner, block)
            self._residency.admit(block)
        sequence.num_shared += 1

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for `num_tokens`, preempting the youngest sequences first; False if it cannot run this step.

        While adapters are loading, the youngest sequence waits instead of preempting itself: their pages can be evicted
        once they are loaded.
        """
        missing = max(self.pages_for(num_tokens) - len(sequence.pages), 0)
        while missing > self._residency.num_available:
            victim = self._running[-1]
            if victim is sequence and self._loading:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing:
            sequence.pages += self._residency.allocate(sequence.owner, missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Release everything a running sequence uses, so that the end of a prefix is evicted before its start."""
        self._pool.release(sequence.owner)
        for index in reversed(range(sequence.num_shared)):
            self._residency.release(BlockPage(sequence.key(index, self._tokens_per_page)))
        if (adapter := sequence.adapter_owner) is not None:
            self._residency.release(adapter)
        sequence.pages, sequence.num_shared = [], 0

    def _needed_adapters(self) -> dict[AdapterPages, Sequence]:
        """Adapters of waiting sequences in queue order, each with the first sequence that needs it."""
        needed: dict[AdapterPages, Sequence] = {}
        for sequence in islice(self._waiting, LOOK_AHEAD):
            if (owner := sequence.adapter_owner) is not None:
                needed.setdefault(owner, sequence)
        return needed

    def _preempt_for_overdue(self) -> None:
        """Preempt the youngest sequences until the first overdue one fits or no sequence is left to preempt."""
        overdue = next((s for s in islice(self._waiting, LOOK_AHEAD) if s.waited_steps > MAX_WAITED_STEPS), None)
        if overdue is None or len(self._running) >= self._max_batch_size:
            return
        while self._try_admit(overdue) is not _Admission.ADMITTED:
            victim = next((s for s in reversed(self._running) if not s.has_yielded), None)
            if victim is None:
                return
            victim.has_yielded = True
            self._preempt(victim)

    def _displace(self) -> None:
        """Where the batch is full, preempt the sequences whose place others may take, each at most once."""
        for sequence in [waiting for waiting in islice(self._waiting, LOOK_AHEAD) if waiting.displaces is not None]:
            if sum(self._is_ready(running) for running in self._running) < self._max_batch_size:
                return
            name, sequence.displaces = sequence.displaces, None
            victim = next((running for running in self._running if running.request_id == name), None)
            if victim is None or victim.has_yielded:
                continue
            victim.has_yielded = True
            self._preempt(victim)
            self._waiting.remove(sequence)
            self._waiting.appendleft(sequence)

    def _admit_waiting(self, slices: list[Slice], budget: int) -> None:
        """Admit waiting sequences, oldest first, within the limits on tokens, sequences and pages.

        Up to one batch of admitted sequences may be waiting for adapters that are loading.
        """
        num_ready = sum(self._is_ready(sequence) for sequence in self._running)
        for sequence in list(islice(self._waiting, LOOK_AHEAD)):
            has_adapter = self._has_adapter(sequence)
            if has_adapter and (budget <= 0 or num_ready >= self._max_batch_size):
                return
            if not has_adapter and len(self._running) - num_ready >= self._max_batch_size:
                continue
            match self._try_admit(sequence):
                case _Admission.ADMITTED if self._is_ready(sequence):
                    num_ready += 1
                    count = min(sequence.num_tokens - sequence.num_computed, budget)
                    slices.append(Slice(sequence, count))
                    budget -= count
                case _Admission.ADMITTED:
                    pass
                case _Admission.NO_ROOM_FOR_ADAPTER if sequence.waited_steps <= MAX_WAITED_STEPS:
                    sequence.waited_steps += 1
                case _:
                    return

    def _has_adapter(self, sequence: Sequence) -> bool:
        owner = sequence.adapter_owner
        return owner is None or (owner in self._residency and owner.name not in self._loading)

    def _prefetch_adapters(self, needed: dict[AdapterPages, Sequence]) -> None:
        """Start loading adapters of waiting sequences, without taking pages that running sequences may need.

        A needed idle adapter is evicted only for one that is needed sooner and for the next batch, and no sequence
        overtakes an overdue one.
        """
        num_sooner = 0
        num_needed = sum(self._residency.num_idle_pages_of(owner) for owner in needed)
        for rank, (owner, sequence) in enumerate(needed.items()):
            if len(self._loading) >= self._max_batch_size or sequence.waited_steps > MAX_WAITED_STEPS:
                return
            num_kept = num_sooner if rank < self._max_batch_size else num_needed
            num_pages = sequence.adapter_num_pages + self.pages_for(sequence.num_tokens) + len(self._running)
            if owner not in self._residency and num_pages + num_kept <= self._residency.num_available:
                self._start_load(owner, sequence.adapter_num_pages)
            num_sooner += self._residency.num_idle_pages_of(owner)

    def _start_load(self, adapter: AdapterPages, num_pages: int) -> None:
        """Allocate an adapter's pages and request its load, which counts as a user until it finishes."""
        self._residency.allocate(adapter, num_pages)
        self._residency.admit(adapter)
        self._loading.add(adapter.name)
        self._loads.append(adapter.name)

    def _try_admit(self, sequence: Sequence) -> _Admission:
        """Allocate pages for a sequence's tokens and adapter, if that leaves one page for each running sequence."""
        blocks = self._cached_blocks(sequence)
        adapter = sequence.adapter_owner
        is_cold = adapter is not None and adapter not in self._residency
        acquired: list[Resident] = [*blocks] if adapter is None or is_cold else [*blocks, adapter]
        for owner in acquired:
            self._residency.acquire(owner)
        num_own_pages = self.pages_for(sequence.num_tokens) - len(blocks)
        room = self._residency.num_available - len(self._running) - num_own_pages
        if room < (sequence.adapter_num_pages if is_cold else 0):
            for owner in reversed(acquired):
                self._residency.release(owner)
            return _Admission.NO_ROOM if room < 0 else _Admission.NO_ROOM_FOR_ADAPTER
        if adapter is not None and is_cold:
            self._start_load(adapter, sequence.adapter_num_pages)
            self._residency.acquire(adapter)
        self._start(sequence, blocks, num_own_pages)
        return _Admission.ADMITTED

    def _start(self, sequence: Sequence, blocks: list[BlockPage], num_own_pages: int) -> None:
        sequence.pages = [page for block in blocks for page in self._pool.pages_of(block)]
        sequence.pages += self._residency.allocate(sequence.owner, num_own_pages)
        sequence.num_shared = len(blocks)
        sequence.num_computed = len(blocks) * self._tokens_per_page
        sequence.waited_steps = 0
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def _cached_blocks(self, sequence: Sequence) -> list[BlockPage]:
        """The sequence's leading blocks that are in the pool; the last token is always computed."""
        blocks: list[BlockPage] = []
        if self._prefix_cache:
            for index in range((sequence.num_tokens - 1) // self._tokens_per_page):
                block = BlockPage(sequence.key(index, self._tokens_per_page))
                if block not in self._residency:
                    break
                blocks.append(block)
        return blocks
