"""The adapters in the engine, and which of them to evict for another. Pure policy: `now` is seconds.

The rule is the engine's own (engine/scheduling/scheduler.py): adapters that no waiting job needs go first, the least
recently used of them before the others; then, only for an urgent request, needed ones, the one needed last first. One
that was just loaded stays until a job used it or its minimum stay is over, so that two cold adapters cannot evict each
other without end. Pinned adapters go only when nothing else is left.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class _Resident:
    num_bytes: int
    pinned: bool = False
    users: int = 0
    loading: bool = True
    stays_until: float = 0.0


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
    """Adapters in the engine by digest, within a budget of bytes.

    An adapter with users (jobs in the engine) is never evicted.
    """

    def __init__(self, budget_bytes: int, min_stay_s: float = 0.0) -> None:
        self.budget_bytes = budget_bytes
        self._min_stay_s = min_stay_s
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

    def reserve(
        self,
        digest: str,
        num_bytes: int,
        needed: Sequence[str],
        *,
        urgent: bool,
        pinned: bool = False,
        now: float = 0.0,
    ) -> Reservation:
        """Make room for an adapter; if granted, it counts as loading.

        Adapters in `needed` have waiting jobs, the one needed first first: only an `urgent` request evicts them, and it
        also drains those in use.
        """
        assert digest not in self._residents, "an adapter is reserved once"
        missing = self.used_bytes + num_bytes - self.budget_bytes
        is_needed = set(needed)
        evict, missing = self._pick(
            missing,
            self._residents,
            lambda name, resident: not resident.users and not resident.pinned and name not in is_needed,
        )
        if missing > 0 and urgent:
            last_first = [name for name in reversed(needed) if name in self._residents]
            for names, eligible in (
                (last_first, lambda _, each: not each.users and not each.pinned and each.stays_until <= now),
                (self._residents, lambda _, each: not each.users and each.pinned),
            ):
                more, missing = self._pick(missing, names, eligible)
                evict += more
        if missing > 0:
            in_use = self._pick(missing, self._residents, _drainable)[0] if urgent else ()
            return Reservation(granted=False, drain=in_use)
        for victim in evict:
            del self._residents[victim]
        self._residents[digest] = _Resident(num_bytes, pinned, stays_until=now + self._min_stay_s)
        return Reservation(granted=True, evict=evict)

    def _pick(self, missing: int, names: Iterable[str], eligible: Eligible) -> tuple[tuple[str, ...], int]:
        """The first eligible adapters until `missing` bytes are covered, and the bytes still missing."""
        picked: list[str] = []
        for name in names:
            if missing <= 0:
                break
            resident = self._residents[name]
            if not resident.loading and eligible(name, resident):
                picked.append(name)
                missing -= resident.num_bytes
        return tuple(picked), missing

    def pin(self, digest: str, *, pinned: bool) -> None:
        """Follow the registry's pin of an adapter; no effect on one that is not here."""
        if (resident := self._residents.get(digest)) is not None:
            resident.pinned = pinned

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
        resident = self._residents[digest]
        resident.users += 1
        resident.stays_until = 0.0
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


def _drainable(_name: str, resident: _Resident) -> bool:
    return bool(resident.users) and not resident.pinned
