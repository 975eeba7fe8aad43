"""The simulator next to a real run of the same queue."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.simulate.measured import Calibration, SchedulingRun

MEASURES = ("tokens_per_s", "loads", "wait_p50_s", "wait_p99_s", "adapters_per_step")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of one policy in one round; `off` is (simulated - real) / real."""

    run: str
    round: int
    policy: str
    measure: str
    real: float
    simulated: float
    off: float


def compare(run: SchedulingRun, calibration: Calibration) -> Iterator[Comparison]:
    """Every measure of every policy and round of a run."""
    for number, (policy, bound, real) in enumerate(run.served):
        served = run.simulate(bound, real["recording"]["chosen"], calibration)
        waits = sorted(served.handed_at)
        simulated = {
            "tokens_per_s": len(waits) * run.data["new_tokens"] / served.end_s,
            "loads": served.loads,
            "wait_p50_s": waits[len(waits) // 2],
            "wait_p99_s": waits[len(waits) * 99 // 100],
            "adapters_per_step": served.adapters / served.steps,
        }
        for measure in MEASURES:
            value, mine = float(real[measure]), float(simulated[measure])
            rounds = number // (1 + len(run.data["bound"]))
            off = (mine - value) / value if value else 0.0
            yield Comparison(run.path.name, rounds, policy, measure, value, round(mine, 3), round(off, 4))
