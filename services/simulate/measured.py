"""Files that `loraq bench scheduling --json` and `loraq bench engine --json` print: calibration and comparison."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import InputError
from services.simulate.engines.costs import Equation, Linear, Work, fit
from services.simulate.engines.hardware import ModelShape
from services.simulate.engines.model import EngineModel
from services.simulate.engines.tiers import Tier
from services.simulate.policies import bounded
from services.simulate.worker import Jobs, Served, Worker, WorkerModel

SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "q_size",
    "kv_size",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a run measured: seconds of steps, and of reading an adapter's bytes in a thread."""

    steps: Linear
    read_byte_s: float


@dataclass(frozen=True, slots=True)
class SchedulingRun:
    """One file of `loraq bench scheduling --json`."""

    path: Path
    data: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        """The base model's."""
        return ModelShape(**{name: self.data["model"][name] for name in SHAPE_FIELDS})

    @property
    def served(self) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        """(policy, bound in tokens, figures) of every policy in every round."""
        for each in self.data["rounds"]:
            for bound, served in zip((0, *self.data["bound"]), each, strict=True):
                yield served["policy"], bound, served

    def equations(self) -> Iterator[Equation]:
        """Every turn that computed a step."""
        for *_, served in self.served:
            for prefill, rows, _, adapter_bytes, load_bytes, seconds in served["recording"]["turns"]:
                if prefill or rows:
                    yield Equation(1, Work(prefill, rows, adapter_bytes, 0.0, load_bytes), seconds)

    def engine(self, steps: Linear) -> EngineModel:
        """The engine that was measured, with these costs."""
        shape = self.shape
        num_pages = self.data["pool_bytes"] // shape.pages().bytes_per_page
        return EngineModel(shape, steps, num_pages, self.data["batch"], max(2048, self.data["batch"]))

    def tiers(self, read_byte_s: float) -> tuple[Tier, ...]:
        """Files in the page cache, behind the throttled link if there was one."""
        if self.data["store"] is None:
            return (Tier("disk", None, 0.0, 1 / read_byte_s, shared=False),)
        latency_s, bytes_per_s = self.data["store"]
        return (Tier("store", None, latency_s, min(bytes_per_s, 1 / read_byte_s)),)

    def simulate(self, bound: int, chosen: Sequence[int], calibration: Calibration) -> Served:
        """Serve the same queue in simulated time."""
        model = WorkerModel(self.engine(calibration.steps), self.tiers(calibration.read_byte_s), self.data["window"])
        num_jobs = self.data["jobs"]
        jobs = Jobs(
            [0.0] * num_jobs,
            [str(number) for number in chosen],
            ["tenant"] * num_jobs,
            [1] * num_jobs,
            [self.data["prompt_len"]] * num_jobs,
            [self.data["new_tokens"]] * num_jobs,
        )
        ranks = {str(number): rank for number, rank in enumerate(self.data["ranks"])}
        return Worker(model, bounded(bound), jobs, ranks).run()


def read_json(path: Path) -> dict[str, Any]:
    """The object on the last line of a file. Raises InputError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise InputError(f"{path} holds no JSON object of a benchmark; write one with `--json > {path}`") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object of a benchmark; write one with `--json > {path}`")
    return found


def read_run(path: Path) -> SchedulingRun:
    """A scheduling run. Raises InputError if the file is another one's."""
    data = read_json(path)
    if not {"rounds", "ranks", "model", "bound"} <= data.keys():
        raise InputError(f"{path} is not of `loraq bench scheduling --json`, which alone records its queue")
    return SchedulingRun(path, data)


def calibrate(paths: Sequence[Path]) -> Calibration:
    """Fit the costs to all these files together.

    A file of `loraq bench scheduling` gives one equation for each step, one of `loraq bench engine` one for the whole
    run. Raises InputError if that is too little to fit.
    """
    equations: list[Equation] = []
    reads: list[tuple[float, float]] = []
    for path in paths:
        data = read_json(path)
        if "rounds" in data:
            run = read_run(path)
            equations += run.equations()
            reads += [(sum(served["recording"]["read_s"]), served["mb_loaded"] * 1e6) for *_, served in run.served]
        elif "cold_first_token_s" in data:
            equations.append(_whole_run(data))
            reads += _cold_load(data)
        else:
            raise InputError(f"{path} is neither of `loraq bench scheduling --json` nor of `loraq bench engine --json`")
    if not any(num_bytes for _, num_bytes in reads):
        raise InputError(
            "none of the files measured an adapter's load; calibrate with a pool smaller than the adapters"
        )
    read_byte_s = sum(seconds for seconds, _ in reads) / sum(num_bytes for _, num_bytes in reads)
    return Calibration(fit(equations), read_byte_s)


def _adapter_bytes(data: Mapping[str, Any]) -> float:
    """Of one adapter of `loraq bench engine`, on average."""
    return float(data["adapter_mb"] * 1e6 / max(1, data["registered"]))


def _whole_run(data: Mapping[str, Any]) -> Equation:
    """A run of `loraq bench engine`, as if every step had a full batch."""
    steps = -(-data["requests"] // data["batch"]) * data["new_tokens"]
    read = steps * min(data["batch"], data["distinct"]) * _adapter_bytes(data)
    tokens = data["requests"] * data["prompt_len"], data["requests"] * data["new_tokens"]
    return Equation(steps, Work(*tokens, read, 0.0, data["run_adapter_mb_in"] * 1e6), data["wall_s"])


def _cold_load(data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Seconds and bytes of loading one adapter, if that was measured."""
    if data["cold_first_token_s"] is None or not data["registered"]:
        return []
    return [(max(0.0, data["cold_first_token_s"] - data["warm_first_token_s"]), _adapter_bytes(data))]
