"""Who stays in the pool: adapters and shared KV blocks that nobody uses give way, least recently used first.

Who knows what is needed next says so with `put_last`.

Policy only: no tensors, no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.memory.pool import AdapterPages, BlockPage, Owner, PagePool
from engine.types import PageId

Resident = AdapterPages | BlockPage


class Residency:
    """Residents of a pool with the number of sequences that use each; those without users are idle.

    Idle adapters and idle blocks stand in one line: neither kind has pages of its own.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._users: dict[Resident, int] = {}
        self._idle: OrderedDict[Resident, None] = OrderedDict()
        self._num_idle_pages = 0
        self.num_evictions = 0
        self.num_adapter_loads = 0
        self.adapter_pages_in = 0
        self.adapter_pages_out = 0

    def __contains__(self, owner: Resident) -> bool:
        return owner in self._users

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: the free ones and those of idle residents."""
        return self._pool.num_free + self._num_idle_pages

    def take(self, owner: Owner, count: int) -> list[PageId]:
        """Give pages to an owner, evicting idle residents as needed."""
        assert 0 <= count <= self.num_available
        while count > self._pool.num_free:
            self._evict(next(iter(self._idle)))
        return list(self._pool.take(owner, count))

    def _evict(self, owner: Resident) -> None:
        self._leave_line(owner)
        del self._users[owner]
        if isinstance(owner, AdapterPages):
            self.adapter_pages_out += len(self._pool.pages_of(owner))
        self._pool.release(owner)
        self.num_evictions += 1

    def admit(self, owner: Resident) -> None:
        """The owner's pages hold its content now; it has one user."""
        assert owner not in self._users
        self._users[owner] = 1
        if isinstance(owner, AdapterPages):
            self.num_adapter_loads += 1
            self.adapter_pages_in += len(self._pool.pages_of(owner))

    def hold(self, owner: Resident) -> None:
        """One more user: the resident stays until all of them have let go."""
        if self._users[owner] == 0:
            self._leave_line(owner)
        self._users[owner] += 1

    def let_go(self, owner: Resident) -> None:
        """One user less; without any it waits for its next use at the end of the line."""
        self._users[owner] -= 1
        if self._users[owner] == 0:
            self._idle[owner] = None
            self._num_idle_pages += len(self._pool.pages_of(owner))

    def _leave_line(self, owner: Resident) -> None:
        del self._idle[owner]
        self._num_idle_pages -= len(self._pool.pages_of(owner))

    def put_last(self, owners: Iterable[Resident]) -> None:
        """Idle residents go to the end of the line, in this order, as if they had been used just now."""
        for owner in owners:
            if owner in self._idle:
                self._idle.move_to_end(owner)

    def num_idle_pages_of(self, owner: Resident) -> int:
        """Pages of a resident that nobody uses; none of one that is used, or not there."""
        return len(self._pool.pages_of(owner)) if owner in self._idle else 0

    def forget(self, owner: Resident) -> None:
        """Give an idle resident's pages back at once; nothing happens when it is not there."""
        if owner in self._users:
            assert self._users[owner] == 0
            self._evict(owner)
