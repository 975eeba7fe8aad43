"""The engine's measured speed, and the lanes' rules that follow from it. Pure policy.

Bounds are in tokens, which measure the work done before a job. A default bound is a number of seconds times the
measured rate. The cost of a prompt token relative to a decoded token is measured too:

    c = seconds of steps that only decoded / their tokens
    p = (seconds of all steps - c * decoded tokens) / prompt tokens computed
    cost of a job = p / c * prompt tokens computed + decoded tokens
"""

from collections.abc import Mapping

from engine import StepStats
from schemas.common import Lane
from services.worker.queue.backlog import LaneRules

OVERTAKE_S = {Lane.INTERACTIVE: 2.0, Lane.STANDARD: 10.0, Lane.BATCH: 60.0}
QUANTA_PER_BOUND = 8
LEAST_QUANTUM_TOKENS = 64.0
FIRST_TOKENS_PER_S = 500.0
"""The assumed rate until the engine has been measured."""
FIRST_PREFILL_WEIGHT = 0.25
WINDOW_S = 2.0
"""Busy seconds after which a measurement counts."""
MEMORY = 0.7
"""Weight of the previous rate in the moving average."""


class Pace:
    """Measures the engine's rate. `overtake_tokens` holds each lane's setting, None for the default."""

    def __init__(self, overtake_tokens: Mapping[Lane, float | None] | Mapping[Lane, int | None]) -> None:
        self._overtake_tokens = overtake_tokens
        self._seen = StepStats()
        self._is_measured = False
        self.tokens_per_s = FIRST_TOKENS_PER_S
        self.prefill_weight = FIRST_PREFILL_WEIGHT

    def restart(self) -> None:
        """Note that a new engine process counts from zero; the rate is kept."""
        self._seen = StepStats()

    def observe(self, stats: StepStats) -> bool:
        """Process the engine's counters; returns whether the rate was updated."""
        window = stats - self._seen
        if window.busy_s < WINDOW_S:
            return False
        self._seen = stats
        rate = (window.prefill_tokens + window.decode_tokens) / window.busy_s
        keep = MEMORY if self._is_measured else 0.0
        self.tokens_per_s = keep * self.tokens_per_s + (1 - keep) * rate
        self._is_measured = True
        self.prefill_weight = prefill_weight(stats) or self.prefill_weight
        return True

    def rules(self) -> dict[Lane, LaneRules]:
        """The lanes' rules at the current rate."""
        return {lane: self._rules(lane) for lane in Lane}

    def _rules(self, lane: Lane) -> LaneRules:
        bound = self._overtake_tokens.get(lane)
        default = OVERTAKE_S[lane] * self.tokens_per_s
        quantum = max(LEAST_QUANTUM_TOKENS, default / QUANTA_PER_BOUND)
        return LaneRules(default if bound is None else bound, quantum, OVERTAKE_S[lane])


def prefill_weight(stats: StepStats) -> float | None:
    """Cost of a prompt token in decoded tokens; None until both kinds of tokens have been measured."""
    if not stats.decode_only_tokens or not stats.prefill_tokens:
        return None
    decoding = stats.decode_only_s / stats.decode_only_tokens
    prefill_s = stats.busy_s - decoding * stats.decode_tokens
    return min(1.0, max(0.01, prefill_s / stats.prefill_tokens / decoding))
