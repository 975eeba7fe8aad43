"""The backend of each device."""

import subprocess
import sys

import pytest

from engine.kernels import load_cpu_kernels, load_kernels
from engine.kernels.triton import TritonKernels


def test_each_device_has_its_backend() -> None:
    assert load_kernels("cpu") is load_cpu_kernels()
    assert isinstance(load_kernels("cuda"), TritonKernels)
    assert isinstance(load_kernels("cuda:1"), TritonKernels)
    with pytest.raises(AssertionError, match="but not for 'tpu'"):
        load_kernels("tpu")


def test_triton_is_not_imported_for_the_cpu() -> None:
    code = "import sys, engine.kernels; engine.kernels.load_kernels('cpu'); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
