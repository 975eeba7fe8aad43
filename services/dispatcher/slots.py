"""Limits on webhooks in flight, in total and per host, so that a slow receiver does not delay the others. Pure.

A host starts with a few slots and gains one with each response in time. After an attempt that timed out it counts as
slow and has one slot. Slow hosts together never hold more than half of all slots.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

START_SLOTS = 2
REMEMBERED_HOSTS = 10_000


@dataclass(frozen=True)
class Capacity:
    """Attempts that may start: in total, by host, and to each host not listed in `by_host`."""

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
        self._slow: set[str] = set()

    @property
    def free(self) -> int:
        """Attempts that may start now, to any host."""
        return self._total - self._in_flight.total()

    def capacity(self, limit: int) -> Capacity:
        """What may be started now, at most `limit` attempts."""
        by_host = {host: max(0, self._free_for(host)) for host in self._in_flight}
        if not self._slow_hosts_have_free_slots:
            by_host |= dict.fromkeys(self._slow, 0)
        return Capacity(min(self.free, limit), by_host, min(START_SLOTS, self._per_host))

    def acquire(self, host: str) -> bool:
        """Take a slot for an attempt to `host`; False if none is free."""
        if self.free <= 0 or self._free_for(host) <= 0:
            return False
        self._in_flight[host] += 1
        return True

    def release(self, host: str, timed_out: bool) -> None:
        """Return the slot of an attempt that has ended."""
        self._in_flight[host] -= 1
        if not self._in_flight[host]:
            del self._in_flight[host]
        self._remember(host, 1 if timed_out else min(self._limit(host) + 1, self._per_host), timed_out)

    def check_integrity(self) -> None:
        """Assert that no limit is exceeded, except by attempts that started before their host became slow."""
        assert self._in_flight.total() <= self._total
        assert all(0 < count <= self._per_host for count in self._in_flight.values())
        assert self._slow <= set(self._limits)

    def _free_for(self, host: str) -> int:
        if host in self._slow and not self._slow_hosts_have_free_slots:
            return 0
        return self._limit(host) - self._in_flight[host]

    @property
    def _slow_hosts_have_free_slots(self) -> bool:
        return sum(self._in_flight[host] for host in self._slow) < max(1, self._total // 2)

    def _limit(self, host: str) -> int:
        return self._limits.get(host, min(START_SLOTS, self._per_host))

    def _remember(self, host: str, limit: int, slow: bool) -> None:
        self._limits[host] = limit
        self._limits.move_to_end(host)
        (self._slow.add if slow else self._slow.discard)(host)
        while len(self._limits) > REMEMBERED_HOSTS:
            forgotten, _ = self._limits.popitem(last=False)
            self._slow.discard(forgotten)
