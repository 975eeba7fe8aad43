"""Back-pressure: which lanes are paused. Pure policy."""

from schemas.common import Lane


class Pressure:
    """Decides which lanes are paused. A lane that reaches its bound is paused until a quarter of it is free.

    The rest must last until new records arrive: the client may be waiting for a fetch of other lanes' empty partitions
    and sends no other fetch before that is answered.
    """

    def __init__(self, bound: int) -> None:
        self._widest = bound
        self.bound = bound
        self._full: set[Lane] = set()
        self._reasons: set[str] = set()

    def pause(self, reason: str) -> None:
        """Pause every lane until `resume` is called with the same reason."""
        self._reasons.add(reason)

    def resume(self, reason: str) -> None:
        """Withdraw a reason to pause."""
        self._reasons.discard(reason)

    def narrow(self, bound: int | None) -> None:
        """Lower the bound of each lane; None restores it."""
        self.bound = self._widest if bound is None else max(1, min(bound, self._widest))

    def paused(self, lane: Lane, num_jobs: int) -> bool:
        """Whether the lane is paused, with that many jobs in memory."""
        if num_jobs >= self.bound:
            self._full.add(lane)
        elif num_jobs <= self.bound * 3 // 4:
            self._full.discard(lane)
        return bool(self._reasons) or lane in self._full

    def room_for_parked(self, num_jobs: int) -> int:
        """How many parked jobs a lane may claim: up to a quarter beyond its bound, as records may fill the rest."""
        return 0 if self._reasons else max(0, self.bound + max(1, self.bound // 4) - num_jobs)

    def room(self, num_jobs: int) -> int:
        """How many more records a lane may consume."""
        return max(0, self.bound - num_jobs)
