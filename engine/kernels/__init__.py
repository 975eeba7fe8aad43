"""The engine's kernels: one set of operators (`Kernels`), a backend per device, and a float32 reference.

README.md documents the equations, the layout, the tolerances and the cost of each operator.
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
    Limits,
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
    "Limits",
    "LoraBatch",
    "LoraTables",
    "PackedLinear",
    "fallback",
    "load_cpu_kernels",
    "load_kernels",
]

_log = logging.getLogger(__name__)


def load_kernels(device: str, *, batch_invariant: bool = False, lora_stream: bool = False) -> Kernels:
    """The operators for a device such as "cuda", "cuda:1" or "cpu"; Triton is imported only for CUDA.

    With `lora_stream`, recorded steps use a second stream for the adapters; the device must then be the current one.

    The C++ operators for the CPU are always batch invariant; the torch fallback is not.
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        from engine.kernels.triton import TritonKernels
        from engine.kernels.triton.second_stream import SecondStream

        return TritonKernels(batch_invariant=batch_invariant, second_stream=SecondStream() if lora_stream else None)
    assert kind == "cpu", f"there are kernels for cpu and cuda, but not for {device!r}"
    return load_cpu_kernels()


@functools.cache
def load_cpu_kernels() -> Kernels:
    """The C++ operators, or slower torch operators, with one warning in the log, if they cannot be built."""
    try:
        return CpuKernels()
    except KernelBuildError as error:
        _log.warning("The C++ kernels are not available; using slower torch operators: %s", error)
        return fallback
