"""The adapters in the engine, and which of them to evict for another. Pure policy."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class _Resident:
    num_bytes: int
    users: int = 0
    loading: bool = True


Eligible: TypeAlias = Callable[[str, _Resident], bool]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Adapters to unload now, and adapters to drain: no more of their jobs may start.

    `granted` is False until there is enough room.
    """

    granted: bool
    evict: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


class Residency:
    """Adapters in the engine by digest, within a budget of bytes; evicts the least recently used first.

    An adapter with users (jobs in the engine) is never evicted.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._residents: OrderedDict[str, _Resident] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of all adapters, including those being loaded."""
        return sum(resident.num_bytes for resident in self._residents.values())

    def digests(self) -> list[str]:
        """Every adapter that is loaded or being loaded, least recently used first."""
        return list(self._residents)

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    def reserve(self, digest: str, num_bytes: int, wanted: Collection[str], *, urgent: bool) -> Reservation:
        """Make room for an adapter; if granted, it counts as loading.

        Adapters in `wanted` have waiting jobs: only an `urgent` request evicts them, and it also drains those in use.
        """
        assert digest not in self._residents, "an adapter is reserved once"
        missing = self.used_bytes + num_bytes - self.budget_bytes
        evict, missing = self._pick(missing, lambda name, resident: not resident.users and name not in wanted)
        if missing > 0 and urgent:
            more, missing = self._pick(missing, lambda name, resident: not resident.users and name in wanted)
            evict += more
        if missing > 0:
            in_use = self._pick(missing, lambda _, resident: bool(resident.users))[0] if urgent else ()
            return Reservation(granted=False, drain=in_use)
        for victim in evict:
            del self._residents[victim]
        self._residents[digest] = _Resident(num_bytes)
        return Reservation(granted=True, evict=evict)

    def _pick(self, missing: int, eligible: Eligible) -> tuple[tuple[str, ...], int]:
        """Least recently used eligible adapters until `missing` bytes are covered, and the bytes still missing."""
        picked: list[str] = []
        for name, resident in self._residents.items():
            if missing <= 0:
                break
            if not resident.loading and eligible(name, resident):
                picked.append(name)
                missing -= resident.num_bytes
        return tuple(picked), missing

    def loaded(self, digest: str, num_bytes: int) -> None:
        """Mark an adapter as loaded, with the size that the engine measured."""
        resident = self._residents[digest]
        resident.loading, resident.num_bytes = False, num_bytes
        self._residents.move_to_end(digest)

    def drop(self, digest: str) -> None:
        """Remove an adapter that is not in the engine."""
        self._residents.pop(digest, None)

    def acquire(self, digest: str) -> None:
        """Count a job with this adapter that goes to the engine."""
        self._residents[digest].users += 1
        self._residents.move_to_end(digest)

    def release(self, digest: str) -> None:
        """Count a job with this adapter that left the engine; no effect if the engine was lost meanwhile."""
        resident = self._residents.get(digest)
        if resident is not None and resident.users:
            resident.users -= 1

    def is_loaded(self, digest: str) -> bool:
        """Whether jobs may start with this adapter."""
        resident = self._residents.get(digest)
        return resident is not None and not resident.loading

    def clear(self) -> None:
        """Remove all adapters: the engine was lost."""
        self._residents.clear()
