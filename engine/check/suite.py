"""What is measured of the engine, and at which sizes."""

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
    load_adapters,
    measure_case,
    measure_overlap,
    numbered,
    trace_arrival,
)
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.triton.measure.cost import RATIO_KEPT, Load, decode_step, ratio
from engine.kernels.triton.measure.shapes import LLAMA, ModelShape

MAKES_ENGINE = Callable[..., Engine]
GIB = 1 << 30
COLD = "cold"


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    The first case of a context and a number of requests is without adapters. `peft` is one of the cases, which the peer
    computes as well; `overlap` runs while `cold` more adapters of rank `cold_rank` come in, one after the other.
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


# Pages for 32 adapters of each rank and the longest case take 41 GB; beside them lie the weights, 16 GB, and once more
# those of fused projections, 9 GB: a GPU of 80 GB has room for all of it. At a context of 4096, 128 requests would take
# 69 GB more.
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
    """A case beside the base model alone and beside what the bytes allow."""

    speed: Speed
    of_base: float | None
    allowed: float | None

    @property
    def reached(self) -> bool | None:
        """At least 95 % of what the bytes allow; None for the base itself."""
        return None if self.of_base is None or self.allowed is None else self.of_base >= RATIO_KEPT * self.allowed


@dataclass
class EngineReport:
    """Filled as it is measured, so that a failure keeps what came before.

    `invariant` is the case of `peft` with `batch_invariant`, `beside` with `lora_stream`, `plain` the same without: one
    of the rows.
    """

    rows: list[Row] = field(default_factory=list)
    plain: Speed | None = None
    invariant: Speed | None = None
    beside: Speed | None = None
    overlap: Overlap | None = None
    attempts: Attempts = field(default_factory=Attempts)


@dataclass(frozen=True)
class PeftReport:
    """The case of `peft` by transformers and PEFT."""

    case: str
    decode_tokens_per_s: float


def measure_engine(
    report: EngineReport,
    scale: Scale,
    directory: Path,
    make_engine: MAKES_ENGINE,
    wait: Callable[[], None],
    trace: Path,
) -> None:
    """Everything but the peer, on one random model. Each measure is on its own: one that fails keeps the others.

    `trace` is written last, as profiling disturbs what comes after.
    """
    _free(scale)
    model, adapters = _random_model(scale, directory)
    where, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    cold = random_adapter(directory / "cold", scale.shape, scale.cold_rank, dtype, where)

    def engine_with(count: int, **options: bool) -> Engine:
        _free(scale)
        engine = _engine(scale, model, make_engine, options)
        load_adapters(engine, adapters, numbered(count))
        return engine

    with report.attempts.make("cases"):
        _measure_cases(report, scale, engine_with(scale.num_adapters), wait)
    with report.attempts.make("batch_invariant"):
        report.invariant = _measure_peft_case(scale, engine_with(scale.peft.adapters, batch_invariant=True), wait)
    with report.attempts.make("lora_stream"):
        report.beside = _measure_peft_case(scale, engine_with(scale.peft.adapters, lora_stream=True), wait)
    with closing(engine_with(scale.overlap.adapters)) as engine:
        with report.attempts.make("overlap"):
            report.overlap = _measure_overlap(scale, engine, cold, wait)
        with report.attempts.make("trace"):
            load_adapters(engine, [cold], [COLD])
            trace_arrival(engine, scale.overlap, COLD, wait, trace)


def _measure_cases(report: EngineReport, scale: Scale, engine: Engine, wait: Callable[[], None]) -> None:
    """The engine is closed, and gone with the call: two of them would not fit."""
    with closing(engine):
        for case in scale.cases:
            speed = measure_case(engine, case, scale.decode_steps, wait)
            report.rows.append(_row(scale, case, speed, report.rows))
            if case == scale.peft:
                report.plain = speed


def _measure_peft_case(scale: Scale, engine: Engine, wait: Callable[[], None]) -> Speed:
    """As `_measure_cases`."""
    with closing(engine):
        return measure_case(engine, scale.peft, scale.decode_steps, wait)


def _measure_overlap(scale: Scale, engine: Engine, cold: Path, wait: Callable[[], None]) -> Overlap:
    names = [f"{COLD} {index}" for index in range(scale.cold)]
    load_adapters(engine, [cold], names)
    return measure_overlap(engine, scale.overlap, names, scale.decode_steps, wait)


def measure_peer(scale: Scale, directory: Path, wait: Callable[[], None]) -> PeftReport:
    """transformers and PEFT on a model of their own, which they change."""
    _free(scale)
    model, adapters = _random_model(scale, directory)
    found = measure_peft(model, adapters, scale.peft, scale.peft_steps, wait)
    return PeftReport(scale.peft.name, found)


def _random_model(scale: Scale, directory: Path) -> tuple[RandomModel, list[Path]]:
    """A model and an adapter of each rank; the same in every run."""
    where, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    model = random_model(directory / "model", scale.shape, dtype, where, scale.context)
    return model, [random_adapter(directory / f"rank {r}", scale.shape, r, dtype, where) for r in scale.ranks]


def _engine(scale: Scale, model: RandomModel, make_engine: MAKES_ENGINE, options: Mapping[str, bool]) -> Engine:
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
    """Beside the newest base among the rows before."""
    if case.adapters == 0:
        return Row(speed, None, None)
    rank = round(sum(scale.ranks) / len(scale.ranks))
    base = next(row.speed for row in reversed(before) if row.allowed is None)
    costs = decode_step(Load(scale.shape, case.requests, case.adapters, rank, case.context))
    return Row(speed, speed.decode_tokens_per_s / base.decode_tokens_per_s, ratio(costs))
