"""How many webhooks may be in flight, and to whom, so that receivers that hang hold up nobody else. Plain Python.

A host starts with a few slots, earns more with each answer in time, and is a suspect with one slot after an attempt
that used up its time. Suspects together never hold more than half of all slots.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

START_SLOTS = 2
REMEMBERED_HOSTS = 10_000


@dataclass(frozen=True)
class Room:
    """Attempts that may start: in all, by host, and to each host that is not named."""

    total: int
    by_host: dict[str, int]
    other_hosts: int


class HostSlots:
    """`total` attempts in flight at once, at most `per_host` to one host (host and port)."""

    def __init__(self, total: int, per_host: int) -> None:
        self._total = total
        self._per_host = max(1, min(per_host, total))
        self._in_flight: Counter[str] = Counter()
        self._limits: OrderedDict[str, int] = OrderedDict()
        self._suspects: set[str] = set()

    @property
    def free(self) -> int:
        """Attempts that may start now, whatever their host."""
        return self._total - self._in_flight.total()

    def room(self, most: int) -> Room:
        """What may be started now, `most` attempts at most."""
        by_host = {host: max(0, self._room_for(host)) for host in self._in_flight}
        if not self._suspects_have_room:
            by_host |= dict.fromkeys(self._suspects, 0)
        return Room(min(self.free, most), by_host, min(START_SLOTS, self._per_host))

    def take(self, host: str) -> bool:
        """Take a slot for an attempt to `host`; False if there is none."""
        if self.free <= 0 or self._room_for(host) <= 0:
            return False
        self._in_flight[host] += 1
        return True

    def give_back(self, host: str, timed_out: bool) -> None:
        """The attempt is over."""
        self._in_flight[host] -= 1
        if not self._in_flight[host]:
            del self._in_flight[host]
        self._remember(host, 1 if timed_out else min(self._limit(host) + 1, self._per_host), timed_out)

    def check_integrity(self) -> None:
        """Assert that no bound is exceeded; suspects may be over theirs only by attempts begun before."""
        assert self._in_flight.total() <= self._total
        assert all(0 < count <= self._per_host for count in self._in_flight.values())
        assert self._suspects <= set(self._limits)

    def _room_for(self, host: str) -> int:
        if host in self._suspects and not self._suspects_have_room:
            return 0
        return self._limit(host) - self._in_flight[host]

    @property
    def _suspects_have_room(self) -> bool:
        return sum(self._in_flight[host] for host in self._suspects) < max(1, self._total // 2)

    def _limit(self, host: str) -> int:
        return self._limits.get(host, min(START_SLOTS, self._per_host))

    def _remember(self, host: str, limit: int, suspect: bool) -> None:
        self._limits[host] = limit
        self._limits.move_to_end(host)
        (self._suspects.add if suspect else self._suspects.discard)(host)
        while len(self._limits) > REMEMBERED_HOSTS:
            forgotten, _ = self._limits.popitem(last=False)
            self._suspects.discard(forgotten)
