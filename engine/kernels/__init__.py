"""The engine's kernels: one set of operators (`Kernels`), a backend for each device, and a float32 reference.

README.md holds the equations, the layout, the tolerances and what each operator costs.
"""

import functools
import logging

import engine.kernels.fallback as fallback
from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.build import KernelBuildError
from engine.kernels.types import (
    PROJECTIONS,
    TILE_COLUMNS,
    TILE_RANKS,
    AttentionBatch,
    Kernels,
    KvCache,
    LoraBatch,
    LoraTables,
    PackedLinear,
)

__all__ = [
    "PROJECTIONS",
    "TILE_COLUMNS",
    "TILE_RANKS",
    "AttentionBatch",
    "KernelBuildError",
    "Kernels",
    "KvCache",
    "LoraBatch",
    "LoraTables",
    "PackedLinear",
    "fallback",
    "load_cpu_kernels",
]

_log = logging.getLogger(__name__)


@functools.cache
def load_cpu_kernels() -> Kernels:
    """The C++ operators, or, said once in the log, slower torch operators where they cannot be built."""
    try:
        return CpuKernels()
    except KernelBuildError as error:
        _log.warning("The C++ kernels are not available, slower torch operators take their place: %s", error)
        return fallback
