"""Where adapters are before they are on the device, and how long it takes to bring them. Pure: times are arguments."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: its room (None: it holds everything), and the link from it to the tier above.

    Transfers share the link's bandwidth one after the other if it is `shared`, and do not disturb each other otherwise;
    their latencies always overlap.
    """

    name: str
    capacity_bytes: float | None
    latency_s: float
    bytes_per_s: float
    shared: bool = True


class Lru:
    """Names within a budget of bytes; the least recently used one is evicted first."""

    def __init__(self, capacity_bytes: float) -> None:
        self._capacity = capacity_bytes
        self._sizes: OrderedDict[str, float] = OrderedDict()
        self._used = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def touch(self, name: str, num_bytes: float) -> None:
        """The name is used; it is inserted if it is not here and fits at all."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return
        if num_bytes > self._capacity:
            return
        self._sizes[name] = num_bytes
        self._used += num_bytes
        while self._used > self._capacity:
            self._used -= self._sizes.popitem(last=False)[1]


class _Place:
    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.content = None if tier.capacity_bytes is None else Lru(tier.capacity_bytes)
        self.free_at = 0.0

    def holds(self, name: str) -> bool:
        return self.content is None or name in self.content

    def transfer(self, now: float, num_bytes: float) -> float:
        begins = now + self.tier.latency_s
        if not self.tier.shared:
            return begins + num_bytes / self.tier.bytes_per_s
        self.free_at = max(begins, self.free_at) + num_bytes / self.tier.bytes_per_s
        return self.free_at


class Tiers:
    """Tiers from the nearest to the farthest, the last of which holds everything.

    `threads` fetches run at once; what is in the nearest of several tiers needs no thread.
    """

    def __init__(self, tiers: Sequence[Tier], threads: int) -> None:
        assert tiers[-1].capacity_bytes is None, "the last tier holds every adapter"
        self._places = [_Place(tier) for tier in tiers]
        self._threads = [0.0] * threads
        self.hits = {tier.name: 0 for tier in tiers}
        self.num_bytes = {tier.name: 0.0 for tier in tiers}

    def fetch(self, name: str, num_bytes: float, now: float) -> float:
        """Bring an adapter up through all tiers above the first that has it; returns when it has arrived."""
        level = next(index for index, place in enumerate(self._places) if place.holds(name))
        found = self._places[level].tier.name
        self.hits[found] += 1
        needs_thread = level > 0 or len(self._places) == 1
        arrives = max(now, heapq.heappop(self._threads)) if needs_thread else now
        for place in reversed(self._places[: level + 1]):
            arrives = place.transfer(arrives, num_bytes)
            self.num_bytes[place.tier.name] += num_bytes
        for place in self._places[: level + 1]:
            if place.content is not None:
                place.content.touch(name, num_bytes)
        if needs_thread:
            heapq.heappush(self._threads, arrives)
        return arrives
