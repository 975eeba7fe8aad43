"""The engine's measurements and their sizes."""

import gc
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.check.attempts import Attempts
from engine.check.model import RandomModel, random_adapter, random_model
from engine.check.peer import measure_peft
from engine.check.speed import (
    Case,
    Overlap,
    Speed,
    adapter_names,
    load_adapters,
    measure_case,
    measure_overlap,
    trace_arrival,
)
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.triton.measure.cost import RATIO_KEPT, Load, decode_step, ratio
from engine.kernels.triton.measure.shapes import LLAMA, ModelShape

EngineFactory = Callable[..., Engine]
GIB = 1 << 30
COLD = "cold"


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    The first case for a context and a number of requests has no adapters. `peft` is one of the cases, which PEFT
    computes as well; `overlap` runs while `cold` more adapters of rank `cold_rank` load, one after the other.
    """

    shape: ModelShape
    device: str
    dtype: str
    ranks: tuple[int, ...]
    cases: tuple[Case, ...]
    peft: Case
    overlap: Case
    cold: int
    cold_rank: int
    decode_steps: int
    peft_steps: int
    pool_bytes: int
    host_bytes: int

    @property
    def context(self) -> int:
        """Positions of the longest sequence."""
        return max(case.context for case in self.cases) + 1024

    @property
    def num_adapters(self) -> int:
        """Adapters that stay loaded."""
        return max(case.adapters for case in self.cases)


# Pages for 32 adapters of each rank and the longest case take 41 GB, the weights 16 GB, and copies of the fused
# projections' weights 9 GB, so an 80 GB GPU has room for all of it. At a context of 4096, 128 requests would take
# another 69 GB.
LLAMA_SCALE = Scale(
    shape=LLAMA,
    device="cuda",
    dtype="bfloat16",
    ranks=(8, 16, 32, 64),
    cases=(
        *(Case(32, adapters, 1024) for adapters in (0, 1, 8, 32)),
        *(Case(32, adapters, 4096) for adapters in (0, 32)),
        *(Case(128, adapters, 1024) for adapters in (0, 128)),
    ),
    peft=Case(32, 32, 1024),
    overlap=Case(32, 8, 1024),
    cold=8,
    cold_rank=16,
    decode_steps=32,
    peft_steps=8,
    pool_bytes=44 * GIB,
    host_bytes=4 * GIB,
)


@dataclass(frozen=True)
class Row:
    """A case compared with the base model alone and with the ratio that the byte model allows."""

    speed: Speed
    of_base: float | None
    allowed: float | None

    @property
    def reached(self) -> bool | None:
        """Whether it reaches 95 % of the allowed ratio; None for the base model."""
        return None if self.of_base is None or self.allowed is None else self.of_base >= RATIO_KEPT * self.allowed


@dataclass
class EngineReport:
    """Filled during the measurements, so that a failure keeps the earlier results.

    `plain` is the case of `peft`, one of the rows; `invariant` the same with `batch_invariant`, `lora_stream` with
    `lora_stream`.
    """

    rows: list[Row] = field(default_factory=list)
    plain: Speed | None = None
    invariant: Speed | None = None
    lora_stream: Speed | None = None
    overlap: Overlap | None = None
    attempts: Attempts = field(default_factory=Attempts)


@dataclass(frozen=True)
class PeftReport:
    """The case of `peft` on transformers and PEFT."""

    case: str
    decode_tokens_per_s: float


def measure_engine(
    report: EngineReport,
    scale: Scale,
    directory: Path,
    make_engine: EngineFactory,
    wait: Callable[[], None],
    trace: Path,
) -> None:
    """Measure everything except PEFT, on one random model. A failure affects only one of the measurements.

    `trace` is written last, as profiling disturbs later measurements.
    """
    _free(scale)
    model, adapters = _random_model(scale, directory)
    where, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    cold = random_adapter(directory / "cold", scale.shape, scale.cold_rank, dtype, where)

    def engine_with(count: int, **options: bool) -> Engine:
        _free(scale)
        engine = _engine(scale, model, make_engine, options)
        load_adapters(engine, adapters, adapter_names(count))
        return engine

    with report.attempts.run("cases"):
        _measure_cases(report, scale, engine_with(scale.num_adapters), wait)
    with report.attempts.run("batch_invariant"):
        report.invariant = _measure_peft_case(scale, engine_with(scale.peft.adapters, batch_invariant=True), wait)
    with report.attempts.run("lora_stream"):
        report.lora_stream = _measure_peft_case(scale, engine_with(scale.peft.adapters, lora_stream=True), wait)
    with closing(engine_with(scale.overlap.adapters)) as engine:
        with report.attempts.run("overlap"):
            report.overlap = _measure_overlap(scale, engine, cold, wait)
        with report.attempts.run("trace"):
            load_adapters(engine, [cold], [COLD])
            trace_arrival(engine, scale.overlap, COLD, wait, trace)


def _measure_cases(report: EngineReport, scale: Scale, engine: Engine, wait: Callable[[], None]) -> None:
    """Measure and close the engine; no reference outlives the call, as two engines would not fit in memory."""
    with closing(engine):
        for case in scale.cases:
            speed = measure_case(engine, case, scale.decode_steps, wait)
            report.rows.append(_row(scale, case, speed, report.rows))
            if case == scale.peft:
                report.plain = speed


def _measure_peft_case(scale: Scale, engine: Engine, wait: Callable[[], None]) -> Speed:
    """Like `_measure_cases`, for one case."""
    with closing(engine):
        return measure_case(engine, scale.peft, scale.decode_steps, wait)


def _measure_overlap(scale: Scale, engine: Engine, cold: Path, wait: Callable[[], None]) -> Overlap:
    names = [f"{COLD} {index}" for index in range(scale.cold)]
    load_adapters(engine, [cold], names)
    return measure_overlap(engine, scale.overlap, names, scale.decode_steps, wait)


def measure_peer(scale: Scale, directory: Path, wait: Callable[[], None]) -> PeftReport:
    """Measure transformers and PEFT on a separate model, which they modify."""
    _free(scale)
    model, adapters = _random_model(scale, directory)
    found = measure_peft(model, adapters, scale.peft, scale.peft_steps, wait)
    return PeftReport(scale.peft.name, found)


def _random_model(scale: Scale, directory: Path) -> tuple[RandomModel, list[Path]]:
    """A model and an adapter of each rank, the same in every run."""
    where, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    model = random_model(directory / "model", scale.shape, dtype, where, scale.context)
    return model, [random_adapter(directory / f"rank {r}", scale.shape, r, dtype, where) for r in scale.ranks]


def _engine(scale: Scale, model: RandomModel, make_engine: EngineFactory, options: Mapping[str, bool]) -> Engine:
    config = EngineConfig(
        model=model.directory,
        device=scale.device,
        dtype=scale.dtype,  # type: ignore[arg-type]  # the configuration checks it
        max_batch_size=max(case.requests for case in scale.cases) + 1,
        max_batch_tokens=4096,
        pool_bytes=scale.pool_bytes,
        prefix_cache=False,
        host_bytes=scale.host_bytes,
        **options,
    )
    return make_engine(config, weights=model.weights)


def _free(scale: Scale) -> None:
    gc.collect()
    if torch.device(scale.device).type == "cuda":
        torch.cuda.empty_cache()


def _row(scale: Scale, case: Case, speed: Speed, before: list[Row]) -> Row:
    """Compare with the latest base case among the rows before."""
    if case.adapters == 0:
        return Row(speed, None, None)
    rank = round(sum(scale.ranks) / len(scale.ranks))
    base = next(row.speed for row in reversed(before) if row.allowed is None)
    costs = decode_step(Load(scale.shape, case.requests, case.adapters, rank, case.context))
    return Row(speed, speed.decode_tokens_per_s / base.decode_tokens_per_s, ratio(costs))
