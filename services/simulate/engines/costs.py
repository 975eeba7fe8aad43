"""What a step of the engine costs, in seconds: by a roofline of a GPU, or by a fit to measured steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from services.errors import InputError
from services.simulate.engines.hardware import Gpu, ModelShape

BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY = 0.8, 0.6
"""Shares of a data sheet's figures that kernels are assumed to reach."""
LAUNCH_S = 0.5e-3
"""Assumed time of a step outside its kernels: launches, sampling, scheduling."""


class Work(NamedTuple):
    """What a step computes and reads: prompt tokens, decoded rows, bytes of adapters, tokens of context, and bytes of
    the adapter loads that begin with it."""

    prefill_tokens: int
    rows: int
    adapter_bytes: float
    context_tokens: float = 0.0
    load_bytes: float = 0.0


class StepCosts(Protocol):
    """How long a step takes."""

    def seconds(self, work: Work) -> float:
        """Of a step with this work."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """seconds = launch + max(bytes / bandwidth, FLOP / FLOP/s); a step reads all weights once."""

    shape: ModelShape
    gpu: Gpu
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    flops_efficiency: float = FLOPS_EFFICIENCY
    launch_s: float = LAUNCH_S

    def read_bytes(self, work: Work) -> float:
        """Bytes of weights, adapters, keys and values."""
        weights = self.shape.step_parameters * self.shape.value_bytes
        return weights + work.adapter_bytes + work.context_tokens * self.shape.kv_bytes_per_token

    def seconds(self, work: Work) -> float:
        """See `StepCosts.seconds`."""
        tokens = work.prefill_tokens + work.rows
        memory_s = self.read_bytes(work) / (self.gpu.bytes_per_s * self.bandwidth_efficiency)
        compute_s = 2 * self.shape.step_parameters * tokens / (self.gpu.flops * self.flops_efficiency)
        return self.launch_s + max(memory_s, compute_s)


@dataclass(frozen=True, slots=True)
class Linear:
    """seconds = step + prefill tokens * b + rows * c + bytes of adapters * d + bytes of beginning loads * e."""

    step_s: float
    prefill_token_s: float
    row_s: float
    adapter_byte_s: float
    load_byte_s: float = 0.0

    def seconds(self, work: Work) -> float:
        """See `StepCosts.seconds`."""
        return (
            self.step_s
            + self.prefill_token_s * work.prefill_tokens
            + self.row_s * work.rows
            + self.adapter_byte_s * work.adapter_bytes
            + self.load_byte_s * work.load_bytes
        )


class Equation(NamedTuple):
    """Steps that together did this work in `seconds`."""

    steps: int
    work: Work
    seconds: float


def fit(equations: Sequence[Equation]) -> Linear:
    """The least squares fit with coefficients of at least 0. Raises InputError if these steps leave it open."""
    features = np.array([(each.steps, *each.work[:3], each.work.load_bytes) for each in equations], dtype=float)
    used = features[:, features.any(axis=0)] if len(features) else features
    if not len(features) or np.linalg.matrix_rank(used / used.max(axis=0)) < used.shape[1]:
        raise InputError(
            f"{len(equations)} measured steps or runs are too alike to calibrate with; give files of runs with other"
            " batches, prompts and adapters, or one of `loraq bench scheduling --json`"
        )
    return Linear(*non_negative(features, np.array([each.seconds for each in equations], dtype=float)).tolist())


def non_negative(features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares with coefficients of at least 0: the most negative one is set to 0 until none is left."""
    scale = np.maximum(features.max(axis=0), 1e-300)
    kept = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    while kept:
        part, *_ = np.linalg.lstsq(features[:, kept] / scale[kept], target, rcond=None)
        worst = int(np.argmin(part))
        if part[worst] >= 0:
            found[kept] = part / scale[kept]
            break
        del kept[worst]
    return found
