"""Zipf's law: weights, draws, and the exponent that fits counted uses best. Pure: seeded by its caller."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_EXPONENT = 8.0


def zipf_shares(count: int, exponent: float) -> Floats:
    """Share of the k-th most popular of `count`, proportional to k ** -exponent."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    shares: Floats = weights / weights.sum()
    return shares


def draw(shares: Floats, size: int, rng: np.random.Generator) -> Ints:
    """Independent draws by these shares."""
    drawn = np.searchsorted(np.cumsum(shares), rng.random(size), side="right")
    return np.minimum(drawn, len(shares) - 1)


def fit_exponent(uses: Ints, count: int) -> float:
    """The exponent under which these uses of `count` adapters are most likely, with ranks by use.

    The likelihood's derivative is the mean of log rank under the law less that in the data; bisection finds its zero.
    Ranking by use takes chance for popularity, so a short trace of many adapters gives too large an exponent.
    """
    ranked = np.sort(uses[uses > 0])[::-1]
    logs = np.log(np.arange(1, count + 1))
    observed = float(ranked @ logs[: len(ranked)]) / float(ranked.sum())
    low, high = 0.0, MOST_EXPONENT
    for _ in range(60):
        middle = (low + high) / 2
        expected = float(zipf_shares(count, middle) @ logs)
        low, high = (middle, high) if expected > observed else (low, middle)
    return (low + high) / 2
