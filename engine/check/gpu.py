"""Checks and measures kernels and engine on this machine's GPU; exit code 2 where there is none.

`python3 -m engine.check.gpu` from the repository's root, or `make gpu-check`. Needs torch, triton, numpy, safetensors,
tokenizers, transformers, peft, jinja2 and pytest. Runs the full grid of the kernels and the engine's oracle and
invariance tests on the device, then measures; prints a table for each part and writes gpu-check.json, and
gpu-check-trace.json, the profile of transfers beside decode.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from engine.check.suite import LLAMA_SCALE, EngineReport, engine_table, measure_engine
from engine.engine import Engine
from engine.kernels.triton.gpu_check import KernelReport, measure_kernels
from engine.kernels.triton.gpu_check import table as kernel_table

REPORT, TRACE = Path("gpu-check.json"), Path("gpu-check-trace.json")
TESTS = ("tests/engine/kernels/triton/grid", "tests/engine/ondevice")
NO_GPU = 2
COMMAND = "python3 -m engine.check.gpu"


def pytest_command(tests: Sequence[str], settings: Path) -> list[str]:
    """pytest without what the project's own settings and other tests ask for; `settings` is an empty file."""
    own = ["-c", str(settings), "--rootdir", ".", "--confcutdir", "tests/engine", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *own, *tests]


def run_tests(tests: Sequence[str] = TESTS) -> int:
    """The tests on the device; pytest's exit code."""
    environment = {**os.environ, "KERNEL_GRID": "full", "PYTHONPATH": "."}
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.NamedTemporaryFile(suffix=".ini") as settings:
        settings.write(b"[pytest]\n")
        settings.flush()
        return subprocess.run(pytest_command(tests, Path(settings.name)), env=environment, check=False).returncode


def report(tests: int, kernels: KernelReport, engine: EngineReport) -> dict[str, object]:
    """What gpu-check.json holds."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": COMMAND,
        "dtype": "bfloat16",
        "tests_exit_code": tests,
        "worst_error_in_tolerances": kernels.worst_error,
        "copy_bytes_per_s": kernels.copy_bandwidth,
        "kernels": [asdict(found) for found in kernels.measurements],
        "engine": asdict(engine),
    }


def main() -> int:
    """Check, measure, report; 0 when everything is right, 1 when not, 2 without a GPU."""
    if not torch.cuda.is_available():
        sys.stderr.write(
            "gpu-check: torch sees no CUDA device here, so nothing was checked; run it on a GPU machine.\n"
        )
        return NO_GPU
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}\n")
    tests = run_tests()
    kernels = measure_kernels()
    sys.stdout.write(f"{kernel_table(kernels.measurements)}\n")
    sys.stdout.write(f"copy: {kernels.copy_bandwidth / 1e12:.2f} TB/s; worst: {kernels.worst_error:.2f} tolerances\n")
    with tempfile.TemporaryDirectory() as directory:
        engine = measure_engine(LLAMA_SCALE, Path(directory), Engine, torch.cuda.synchronize, TRACE)
    sys.stdout.write(f"{engine_table(engine)}\n")
    REPORT.write_text(json.dumps(report(tests, kernels, engine), indent=1) + "\n")
    return int(tests != 0 or kernels.worst_error >= 1)


if __name__ == "__main__":
    sys.exit(main())
