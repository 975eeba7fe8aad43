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
    """The operators of a device, "cuda", "cuda:1" or "cpu"; Triton is not imported unless it is needed.

    With `lora_stream` recorded steps have a second stream for the adapters; the device must be the current one then.

    Those of the CPU are batch invariant in any case, but for the slower ones without a C++ compiler.
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        from engine.kernels.triton import TritonKernels
        from engine.kernels.triton.second_stream import SecondStream

        return TritonKernels(batch_invariant=batch_invariant, second_stream=SecondStream() if lora_stream else None)
    assert kind == "cpu", f"there are kernels for cpu and cuda, not for {device!r}"
    return load_cpu_kernels()


@functools.cache
def load_cpu_kernels() -> Kernels:
    """The C++ operators, or, said once in the log, slower torch operators where they cannot be built."""
    try:
        return CpuKernels()
    except KernelBuildError as error:
        _log.warning("The C++ kernels are not available, slower torch operators take their place: %s", error)
        return fallback
