"""The results of a run so far. A part that fails leaves its traceback, and the others continue."""

import gc
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.check.attempts import Attempts
from engine.check.output import print_line
from engine.check.suite import EngineReport, PeftReport
from engine.kernels.triton.measure.gpu_check import KernelReport


@dataclass
class Findings:
    """Results by part; None or an empty report if a part was not selected or failed."""

    about: Mapping[str, str]
    tests_exit_code: int | None = None
    kernels: KernelReport | None = None
    engine: EngineReport = field(default_factory=EngineReport)
    peft: PeftReport | None = None
    parts: Attempts = field(default_factory=Attempts)

    @property
    def exit_code(self) -> int:
        """0 if every result is present and correct, regardless of the speeds."""
        is_wrong = self.kernels is not None and not self.kernels.worst_error < 1
        return int(bool(self.errors) or bool(self.tests_exit_code) or is_wrong)

    @property
    def errors(self) -> Mapping[str, str]:
        """Tracebacks of the parts and of the engine's measurements."""
        return self.parts.errors | self.engine.attempts.errors

    def write(self, path: Path) -> None:
        """Write the findings as JSON, atomically."""
        found = asdict(self)
        parts = found.pop("parts")
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps({**found.pop("about"), **found, **parts}, indent=1) + "\n")
        os.replace(unfinished, path)


Part = Callable[[Findings], None]
"""Measures something and stores it in the findings."""


def run_parts(parts: Mapping[str, Part], findings: Findings, report: Path) -> None:
    """Run the parts in order; write the report after each."""
    for name, measure in parts.items():
        print_line(f"== {name}")
        with findings.parts.run(name):
            measure(findings)
        print_line(f"== {name}: {findings.parts.seconds[name]:.0f} s")
        findings.write(report)
        gc.collect()
