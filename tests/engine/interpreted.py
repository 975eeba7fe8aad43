"""Runs tests of the CUDA kernels in Triton's interpreter, with only the packages that `engine.check.gpu` needs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_LISTED = ("boto3", "aiokafka", "asyncpg", "pydantic", "hypothesis", "pytest_asyncio", "pytest_timeout", "structlog")


def check(folder: Path, own: Path) -> None:
    """Run a folder's tests in a subprocess in which the libraries of `NOT_LISTED` cannot be imported."""
    blocked = f"import sys\nfor name in {NOT_LISTED!r}:\n    sys.modules[name] = None\n"
    (own / "sitecustomize.py").write_text(blocked)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{own}:{ROOT}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=25", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
