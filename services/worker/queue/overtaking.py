"""How many tokens of later arrivals have passed a job. Pure policy.

    passed(j) = tokens admitted, while j could run, of jobs that arrived after j

A job that passed a younger job arrived after the oldest job too, so it passed both. Hence no job is passed by more
tokens than the oldest one, and a bound on the oldest job bounds them all.
"""

import heapq


class Overtaking:
    """Counts the admitted tokens that arrived after the oldest waiting job of one queue."""

    def __init__(self) -> None:
        self._admitted: list[int] = []
        self._tokens: dict[int, float] = {}
        self._sum = 0.0

    def passed(self, oldest: int) -> float:
        """Tokens that have passed the job whose place in the order of arrival is `oldest`."""
        while self._admitted and self._admitted[0] < oldest:
            self._sum -= self._tokens.pop(heapq.heappop(self._admitted))
        if not self._admitted:
            self._sum = 0.0  # so that rounding errors do not accumulate
        return self._sum

    def allows(self, oldest: int, order: int, tokens: float, bound: float) -> bool:
        """Whether a job of that order may be admitted before the oldest one."""
        return order == oldest or self.passed(oldest) + tokens <= bound

    def admit(self, order: int, tokens: float) -> None:
        """Count an admitted job."""
        heapq.heappush(self._admitted, order)
        self._tokens[order] = tokens
        self._sum += tokens

    def correct(self, order: int, tokens: float) -> None:
        """Replace the token count of an admitted job."""
        if order in self._tokens:
            self._sum += tokens - self._tokens[order]
            self._tokens[order] = tokens

    def clear(self) -> None:
        """Forget all admissions; no job waits that they could have passed."""
        self._admitted.clear()
        self._tokens.clear()
        self._sum = 0.0
