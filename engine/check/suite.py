"""What is measured of the engine, at which sizes, and the table of it."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.check.model import RandomModel, random_adapter, random_model
from engine.check.peer import measure_peft
from engine.check.speed import Case, Overlap, Speed, load_adapters, measure_case, measure_overlap
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.triton.cost import LLAMA, RATIO_KEPT, Load, decode_step, ratio
from engine.kernels.triton.shapes import ModelShape

MAKES_ENGINE = Callable[..., Engine]
POOL_SHARE = 0.8
MIB = 1 << 20
PEFT_FACTOR, MOST_STEP_COST = 20.0, 0.05


@dataclass(frozen=True)
class Scale:
    """Sizes of a run. `pool_bytes` None is a share of the device's free memory.

    The first case of a context and a number of requests is without adapters. `peft` is measured by both; `overlap` runs
    while `cold` more adapters of rank `cold_rank` come in, one after the other.
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
    pool_bytes: int | None = None
    host_bytes: int = 4096 * MIB

    @property
    def context(self) -> int:
        """Positions of the longest sequence."""
        return max(case.context for case in self.cases) + 1024

    @property
    def num_adapters(self) -> int:
        """Adapters that stay loaded."""
        return max(case.adapters for case in self.cases)


LLAMA_SCALE = Scale(
    shape=LLAMA,
    device="cuda",
    dtype="bfloat16",
    ranks=(8, 16, 32, 64),
    cases=(
        *(Case(32, adapters, context) for context in (1024, 4096) for adapters in (0, 1, 8, 32)),
        *(Case(128, adapters, 1024) for adapters in (0, 128)),
    ),
    peft=Case(32, 32, 1024),
    overlap=Case(32, 8, 1024),
    cold=8,
    cold_rank=16,
    decode_steps=32,
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


@dataclass(frozen=True)
class EngineReport:
    """`invariant` is the case of `peft` with `batch_invariant`, `plain` the same without."""

    rows: list[Row]
    plain: Speed
    invariant: Speed
    peft_tokens_per_s: float
    overlap: Overlap


def measure_engine(
    scale: Scale, directory: Path, make_engine: MAKES_ENGINE, wait: Callable[[], None], trace: Path | None
) -> EngineReport:
    """Everything, on one random model."""
    where, dtype = torch.device(scale.device), getattr(torch, scale.dtype)
    model = random_model(directory / "model", scale.shape, dtype, where, scale.context)
    adapters = [random_adapter(directory / f"rank {r}", scale.shape, r, dtype, where) for r in scale.ranks]
    cold = random_adapter(directory / "cold", scale.shape, scale.cold_rank, dtype, where)
    engine = _engine(scale, model, make_engine, batch_invariant=False)
    load_adapters(engine, model, adapters, scale.num_adapters)
    rows = _rows(scale, [measure_case(engine, case, scale.decode_steps, wait) for case in scale.cases])
    plain = measure_case(engine, scale.peft, scale.decode_steps, wait)
    overlap = _measure_overlap(scale, engine, cold, wait, trace)
    del engine
    _free(scale)
    invariant_engine = _engine(scale, model, make_engine, batch_invariant=True)
    load_adapters(invariant_engine, model, adapters, scale.peft.adapters)
    invariant = measure_case(invariant_engine, scale.peft, scale.decode_steps, wait)
    del invariant_engine
    _free(scale)
    return EngineReport(
        rows, plain, invariant, measure_peft(model, adapters, scale.peft, scale.decode_steps, wait), overlap
    )


def _engine(scale: Scale, model: RandomModel, make_engine: MAKES_ENGINE, *, batch_invariant: bool) -> Engine:
    config = EngineConfig(
        model=model.directory,
        device=scale.device,
        dtype=scale.dtype,  # type: ignore[arg-type]  # the configuration checks it
        max_batch_size=max(case.requests for case in scale.cases) + 1,
        max_batch_tokens=4096,
        pool_bytes=scale.pool_bytes or int(POOL_SHARE * torch.cuda.mem_get_info()[0]),
        prefix_cache=False,
        host_bytes=scale.host_bytes,
        batch_invariant=batch_invariant,
    )
    return make_engine(config, weights=model.weights)


def _measure_overlap(scale: Scale, engine: Engine, cold: Path, wait: Callable[[], None], trace: Path | None) -> Overlap:
    names = [f"cold {index}" for index in range(scale.cold)]
    for name in names:
        engine.load_adapter(name, cold)
    return measure_overlap(engine, scale.overlap, names, scale.decode_steps, wait, trace)


def _free(scale: Scale) -> None:
    gc.collect()
    if torch.device(scale.device).type == "cuda":
        torch.cuda.empty_cache()


def _rows(scale: Scale, speeds: list[Speed]) -> list[Row]:
    rank = round(sum(scale.ranks) / len(scale.ranks))
    rows, base = [], speeds[0]
    for case, speed in zip(scale.cases, speeds, strict=True):
        if case.adapters == 0:
            base = speed
            rows.append(Row(speed, None, None))
            continue
        costs = decode_step(Load(scale.shape, case.requests, case.adapters, rank, case.context))
        rows.append(Row(speed, speed.decode_tokens_per_s / base.decode_tokens_per_s, ratio(costs)))
    return rows


def engine_table(report: EngineReport) -> str:
    """Aligned rows for a terminal, which are Markdown as well, and a line for each of the other measures."""
    lines = [
        "| case | prefill tokens/s | decode tokens/s | of base | bytes allow | target |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(_line(row) for row in report.rows),
    ]
    cost = 1 - report.invariant.decode_tokens_per_s / report.plain.decode_tokens_per_s
    factor = report.plain.decode_tokens_per_s / report.peft_tokens_per_s
    overlap = report.overlap
    plain, invariant = report.plain.decode_tokens_per_s, report.invariant.decode_tokens_per_s
    invariance = f"{plain:.0f} tokens/s; {invariant:.0f} with batch_invariant, which costs {cost:.0%}"
    peft = f"transformers + PEFT: {report.peft_tokens_per_s:.0f} tokens/s, {factor:.1f} times less"
    size = f"{overlap.adapter_bytes / 1e6:.0f} MB"
    cold = f"a cold adapter of {size} costs the others {overlap.step_cost:.1%} of their tokens"
    return "\n".join(
        (
            *lines,
            "",
            f"{report.plain.case}: {invariance}",
            f"{peft}: {_target(factor >= PEFT_FACTOR)}",
            f"{cold}: {_target(overlap.step_cost < MOST_STEP_COST)}; first token {overlap.arrival_s * 1e3:.0f} ms",
        )
    )


def _line(row: Row) -> str:
    speed = row.speed
    ratios = ("" if value is None else f"{value:.3f}" for value in (row.of_base, row.allowed))
    target = "" if row.reached is None else _target(row.reached)
    cells = (speed.case, f"{speed.prefill_tokens_per_s:.0f}", f"{speed.decode_tokens_per_s:.0f}", *ratios, target)
    return f"| {' | '.join(cells)} |"


def _target(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"
