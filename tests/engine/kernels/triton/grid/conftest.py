"""Runs on the device where there is one, else in Triton's interpreter, else not at all."""

import pytest
import torch

from tests.engine.kernels.triton.grid.device import INTERPRETED, OnDevice, run_here

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def kernels() -> OnDevice:
    """The backend over tensors of the CPU, its scratch full of NaN at each use; in the interpreter under watch."""
    from engine.kernels.triton import TritonKernels

    backend = TritonKernels(run_here)
    backend.scratch.poisoned = True
    return OnDevice(backend, "cpu" if INTERPRETED else "cuda")
