"""What a worker has served lately, by adapter. Pure: `now` is seconds on a steady clock."""

from collections import Counter, deque
from typing import TypeAlias

BUCKET_S = 5.0
WINDOW_S = 60.0
RATE_S = 10.0
BUSIEST = 16

Name: TypeAlias = tuple[str, str]
"""Tenant and adapter, without its version."""


class LoadMeter:
    """Counts tokens of the last minute, in buckets of a few seconds."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._buckets: deque[tuple[float, Counter[Name]]] = deque()
        self._base: Name = ("", "")

    def ended(self, name: Name | None, tokens: int, now: float) -> None:
        """A job with these tokens, prompt and output, ended; `name` is None for the base model."""
        start = now - now % BUCKET_S
        if not self._buckets or self._buckets[-1][0] != start:
            self._buckets.append((start, Counter()))
            self._forget(now)
        self._buckets[-1][1][self._base if name is None else name] += tokens

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] + BUCKET_S <= now - WINDOW_S:
            self._buckets.popleft()

    def tokens_per_s(self, now: float) -> float:
        """The mean rate of the last seconds."""
        since = max(now - RATE_S, self._began)
        tokens = sum(counts.total() for start, counts in self._buckets if start + BUCKET_S > since)
        oldest = min((start for start, _ in self._buckets if start + BUCKET_S > since), default=now)
        return tokens / max(now - max(oldest, self._began), 1.0)

    def tokens(self, now: float) -> float:
        """Tokens of the last minute."""
        self._forget(now)
        return float(sum(counts.total() for _, counts in self._buckets))

    def busiest(self, now: float) -> dict[Name, float]:
        """Tokens of the last minute by adapter, of those with most."""
        self._forget(now)
        total = sum((counts for _, counts in self._buckets), Counter[Name]())
        del total[self._base]
        return {name: float(tokens) for name, tokens in total.most_common(BUSIEST)}
