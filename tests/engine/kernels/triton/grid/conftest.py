"""Runs on a GPU if there is one, or in Triton's interpreter if it is enabled; otherwise not at all."""

import pytest
import torch

from tests.engine.kernels.triton.grid.device import INTERPRETED, OnDevice, run_here

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def kernels() -> OnDevice:
    """The backend for CPU tensors, with NaN-filled scratch; in the interpreter, memory accesses are checked."""
    from engine.kernels.triton import TritonKernels

    backend = TritonKernels(run_here)
    backend.scratch.poisoned = True
    return OnDevice(backend, "cpu" if INTERPRETED else "cuda")
