"""The engine on Triton kernels: on the device where there is one, else in Triton's interpreter, else not at all."""

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
    """An engine in a cycle stays until it is collected: its graphs are not to go in the midst of another's."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def _real_or_fake_cuda() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else FakeCuda():
        yield
