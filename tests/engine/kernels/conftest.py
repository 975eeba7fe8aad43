import pytest

from engine.kernels import Kernels, fallback
from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.build import FLAGS

PORTABLE_FLAGS = ("-O2", "-march=x86-64-v3", *FLAGS[2:])  # the code path of an AVX2 machine without bf16 instructions


@pytest.fixture(scope="session")
def cpu() -> CpuKernels:
    return CpuKernels()


@pytest.fixture(scope="session", params=["cpu", "portable"])
def compiled(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(PORTABLE_FLAGS if request.param == "portable" else None)


@pytest.fixture(scope="session", params=["cpu", "portable", "fallback"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "fallback":
        return fallback
    return CpuKernels(PORTABLE_FLAGS if request.param == "portable" else None)
