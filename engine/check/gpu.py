"""Check and measure kernels and engine on this machine's GPU; exit code 2 if the machine lacks a requirement.

`python3 -m engine.check.gpu` from the repository's root, or `make gpu-check`. Needs torch, triton, numpy, safetensors,
tokenizers, transformers, peft, jinja2 and pytest, and 80 GB of the GPU's memory. Runs the full grid of the kernels and
the engine's oracle and invariance tests on the device, then measures; prints a table and writes gpu-check.json after
each part, and gpu-check-trace.json.gz, the profile of a transfer during decode. `--only` selects the parts to run.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.check.requirements import EXIT_MISSING, format_missing, missing_requirements

if TYPE_CHECKING:
    from engine.check.findings import Findings, Part

COMMAND = "python3 -m engine.check.gpu"
PARTS = ("tests", "kernels", "engine", "peft")
REPORT, TRACE = Path("gpu-check.json"), Path("gpu-check-trace.json.gz")


def part_functions(directory: Path) -> Mapping[str, "Part"]:
    """The function of each part, in the order in which they run."""
    import torch

    from engine.check.device_tests import run_device_tests
    from engine.check.suite import LLAMA_SCALE, measure_engine, measure_peer
    from engine.engine import Engine
    from engine.kernels.triton.measure.gpu_check import LLAMA_KERNELS, gpu_clock, measure_kernels

    wait = torch.cuda.synchronize

    def tests(findings: "Findings") -> None:
        findings.tests_exit_code = run_device_tests()

    def kernels(findings: "Findings") -> None:
        findings.kernels = measure_kernels(LLAMA_KERNELS, gpu_clock)

    def engine(findings: "Findings") -> None:
        measure_engine(findings.engine, LLAMA_SCALE, directory / "engine", Engine, wait, TRACE)

    def peft(findings: "Findings") -> None:
        findings.peft = measure_peer(LLAMA_SCALE, directory / "peft", wait)

    return dict(zip(PARTS, (tests, kernels, engine, peft), strict=True))


def check(chosen: Sequence[str]) -> int:
    """Test, measure and report; returns 0 if every result is correct, regardless of the speeds."""
    import torch
    import triton

    from engine.check.findings import Findings, run_parts
    from engine.check.output import print_line
    from engine.check.table import table

    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print_line(", ".join(f"{name} {value}" for name, value in versions.items()))
    findings = Findings({**versions, "command": COMMAND, "dtype": "bfloat16"})
    with tempfile.TemporaryDirectory() as directory:
        parts = part_functions(Path(directory))
        run_parts({name: part for name, part in parts.items() if name in chosen}, findings, REPORT)
    print_line(table(findings))
    return findings.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if everything is correct, 1 if not, 2 if nothing could be checked."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Check and measure kernels and engine on a GPU.")
    parser.add_argument("--only", action="append", choices=PARTS, help="run only this part; can be repeated")
    chosen = parser.parse_args(arguments).only or PARTS
    if missing := missing_requirements() or missing_gpu():
        sys.stderr.write(format_missing(missing))
        return EXIT_MISSING
    return check(chosen)


def missing_gpu() -> list[str]:
    """A sentence if torch finds no GPU, as in `missing_requirements`."""
    import torch

    if torch.cuda.is_available():
        return []
    return ["torch finds no CUDA device, so nothing was checked; run it on a machine with a GPU"]


if __name__ == "__main__":
    sys.exit(main())
