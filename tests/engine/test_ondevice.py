"""Runs tests/engine/ondevice in Triton's interpreter, in a subprocess: it must be enabled before Triton is imported."""

from pathlib import Path

import pytest

from tests.engine.interpreted import check

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_the_engine_works_on_the_triton_kernels(tmp_path: Path) -> None:
    check(Path(__file__).parent / "ondevice", tmp_path)
