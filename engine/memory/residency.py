"""Eviction: idle adapters and idle shared KV blocks leave the pool, least recently used first.

The scheduler uses `evict_last` to keep residents that it will need soon. Policy only: no tensors, no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from engine.memory.pool import AdapterPages, BlockPage, Owner, PagePool
from engine.types import PageId

Resident = AdapterPages | BlockPage


class Residency:
    """The residents of a pool, each with a count of its users; a resident without users is idle.

    Idle adapters and idle blocks share one LRU queue: neither kind has reserved pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._users: dict[Resident, int] = {}
        self._idle: OrderedDict[Resident, None] = OrderedDict()
        self._adapters: dict[AdapterPages, None] = {}
        self._num_idle_pages = 0
        self.num_evictions = 0
        self.num_adapter_loads = 0
        self.adapter_pages_in = 0
        self.adapter_pages_out = 0

    def __contains__(self, owner: Resident) -> bool:
        return owner in self._users

    @property
    def adapters(self) -> Collection[AdapterPages]:
        """Adapters that have pages, including those that are being loaded."""
        return self._adapters.keys()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can provide: free ones and those of idle residents."""
        return self._pool.num_free + self._num_idle_pages

    def allocate(self, owner: Owner, count: int) -> list[PageId]:
        """Allocate pages to an owner, evicting idle residents as needed."""
        assert 0 <= count <= self.num_available
        while count > self._pool.num_free:
            self._evict(next(iter(self._idle)))
        return list(self._pool.allocate(owner, count))

    def _evict(self, owner: Resident) -> None:
        self._remove_idle(owner)
        del self._users[owner]
        if isinstance(owner, AdapterPages):
            del self._adapters[owner]
            self.adapter_pages_out += len(self._pool.pages_of(owner))
        self._pool.release(owner)
        self.num_evictions += 1

    def admit(self, owner: Resident) -> None:
        """Register an owner whose pages are allocated; it starts with one user."""
        assert owner not in self._users
        self._users[owner] = 1
        if isinstance(owner, AdapterPages):
            self._adapters[owner] = None
            self.num_adapter_loads += 1
            self.adapter_pages_in += len(self._pool.pages_of(owner))

    def acquire(self, owner: Resident) -> None:
        """Add a user; the resident stays in the pool until all users have released it."""
        if self._users[owner] == 0:
            self._remove_idle(owner)
        self._users[owner] += 1

    def release(self, owner: Resident) -> None:
        """Remove a user; a resident without users becomes idle, at the end of the LRU queue."""
        self._users[owner] -= 1
        if self._users[owner] == 0:
            self._idle[owner] = None
            self._num_idle_pages += len(self._pool.pages_of(owner))

    def _remove_idle(self, owner: Resident) -> None:
        del self._idle[owner]
        self._num_idle_pages -= len(self._pool.pages_of(owner))

    def evict_last(self, owners: Iterable[Resident]) -> None:
        """Move idle residents to the end of the LRU queue, in this order, as if they had just been used."""
        for owner in owners:
            if owner in self._idle:
                self._idle.move_to_end(owner)

    def num_idle_pages_of(self, owner: Resident) -> int:
        """Number of pages of an idle resident; 0 if the owner is in use or not in the pool."""
        return len(self._pool.pages_of(owner)) if owner in self._idle else 0

    def discard(self, owner: Resident) -> None:
        """Evict an idle resident now; a no-op if it is not in the pool."""
        if owner in self._users:
            assert self._users[owner] == 0
            self._evict(owner)
