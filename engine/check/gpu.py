"""Checks and measures kernels and engine on this machine's GPU; exit code 2 where there is none.

`python3 -m engine.check.gpu` from the repository's root, or `make gpu-check`. Needs torch, triton, numpy, safetensors,
tokenizers, transformers, peft, jinja2 and pytest, and 80 GB of the GPU's memory. Runs the full grid of the kernels and
the engine's oracle and invariance tests on the device, then measures; prints a table and writes gpu-check.json, and
gpu-check-trace.json, the profile of transfers beside decode.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

NO_GPU = 2
COMMAND = "python3 -m engine.check.gpu"
REPORT, TRACE = Path("gpu-check.json"), Path("gpu-check-trace.json")


def check() -> int:
    """Test, measure, report; 0 when every result is right, whatever the speeds."""
    import triton

    from engine.check.device_tests import run_device_tests
    from engine.check.suite import LLAMA_SCALE, measure_engine
    from engine.check.table import table
    from engine.engine import Engine
    from engine.kernels.triton.gpu_check import LLAMA_KERNELS, gpu_clock, measure_kernels

    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    sys.stdout.write(f"{', '.join(f'{name} {value}' for name, value in versions.items())}\n")
    tests = run_device_tests()
    kernels = measure_kernels(LLAMA_KERNELS, gpu_clock)
    with tempfile.TemporaryDirectory() as directory:
        engine = measure_engine(LLAMA_SCALE, Path(directory), Engine, torch.cuda.synchronize, TRACE)
    sys.stdout.write(f"{table(kernels, engine)}\n")
    found = {"tests_exit_code": tests, "kernels": asdict(kernels), "engine": asdict(engine)}
    REPORT.write_text(json.dumps({**versions, "command": COMMAND, "dtype": "bfloat16", **found}, indent=1) + "\n")
    return int(tests != 0 or kernels.worst_error >= 1)


def main() -> int:
    """0 when everything is right, 1 when not, 2 without a GPU."""
    if torch.cuda.is_available():
        return check()
    sys.stderr.write("gpu-check: torch sees no CUDA device here, so nothing was checked; run it on a GPU machine.\n")
    return NO_GPU


if __name__ == "__main__":
    sys.exit(main())
