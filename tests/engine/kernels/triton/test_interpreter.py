"""Runs the grid in Triton's interpreter, in a new process, as it must be enabled before Triton is imported."""

from pathlib import Path

import pytest

from tests.engine.interpreted import check

pytestmark = pytest.mark.slow


def test_the_grid_passes_in_the_interpreter(tmp_path: Path) -> None:
    check(Path(__file__).parent / "grid", tmp_path)
