"""Which lanes take no more records for now. Pure policy."""

from schemas.common import Lane


class Pressure:
    """Which lanes are paused. A lane that reached its bound is paused until a quarter of it is free.

    What is left must last until records come again: a fetch for the empty partitions of other lanes may be under way,
    and the client sends no other until that one is answered.
    """

    def __init__(self, bound: int) -> None:
        self._widest = bound
        self.bound = bound
        self._full: set[Lane] = set()
        self._reasons: set[str] = set()

    def pause(self, reason: str) -> None:
        """Pause every lane for as long as the reason stands."""
        self._reasons.add(reason)

    def resume(self, reason: str) -> None:
        """The reason no longer stands."""
        self._reasons.discard(reason)

    def narrow(self, bound: int | None) -> None:
        """Let a lane hold no more than that many jobs for now; None for as many as ever."""
        self.bound = self._widest if bound is None else max(1, min(bound, self._widest))

    def paused(self, lane: Lane, num_held: int) -> bool:
        """Whether the lane, with that many jobs in memory, takes no more."""
        if num_held >= self.bound:
            self._full.add(lane)
        elif num_held <= self.bound * 3 // 4:
            self._full.discard(lane)
        return bool(self._reasons) or lane in self._full

    def spare(self, num_held: int) -> int:
        """How many parked jobs a lane may take: a quarter more than records, so that a flood cannot keep them out."""
        return 0 if self._reasons else max(0, self.bound + max(1, self.bound // 4) - num_held)

    def room(self, num_held: int) -> int:
        """How many more records a lane may take."""
        return max(0, self.bound - num_held)
