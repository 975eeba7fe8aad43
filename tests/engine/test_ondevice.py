"""The engine on Triton kernels, in the interpreter, which must be switched on before Triton is imported."""

from pathlib import Path

import pytest

from tests.engine.interpreted import check

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_the_engine_keeps_its_promises_on_the_cuda_kernels(tmp_path: Path) -> None:
    check(Path(__file__).parent / "ondevice", tmp_path)
