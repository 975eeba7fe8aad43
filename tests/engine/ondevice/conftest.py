"""The engine on Triton kernels: on a GPU, or in Triton's interpreter with a fake GPU; skipped without either."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.engine.ondevice.fake_gpu import FakeCuda

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _engines_end_with_their_test() -> Iterator[None]:
    """Collect engines in reference cycles, so that their graphs are not destroyed during another test's capture."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def _real_or_fake_cuda() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else FakeCuda():
        yield
