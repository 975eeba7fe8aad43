"""The kernels are right: the grid in Triton's interpreter, which must be switched on before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

GRID = Path(__file__).parent / "grid"
ROOT = Path(__file__).parents[4]


def test_the_grid_passes_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GRID)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
