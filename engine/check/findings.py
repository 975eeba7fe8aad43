"""All that a run has found so far. A part that fails leaves its traceback, and the others go on."""

import gc
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.check.attempts import Attempts
from engine.check.output import say
from engine.check.suite import EngineReport, PeftReport
from engine.kernels.triton.measure.gpu_check import KernelReport


@dataclass
class Findings:
    """By part; None, or an empty report, where a part was not asked for or has failed."""

    about: Mapping[str, str]
    tests_exit_code: int | None = None
    kernels: KernelReport | None = None
    engine: EngineReport = field(default_factory=EngineReport)
    peft: PeftReport | None = None
    parts: Attempts = field(default_factory=Attempts)

    @property
    def exit_code(self) -> int:
        """0 when every result is there and right, whatever the speeds."""
        is_wrong = self.kernels is not None and not self.kernels.worst_error < 1
        return int(bool(self.errors) or bool(self.tests_exit_code) or is_wrong)

    @property
    def errors(self) -> Mapping[str, str]:
        """Tracebacks of the parts and of the engine's measures."""
        return self.parts.errors | self.engine.attempts.errors

    def write(self, path: Path) -> None:
        """As JSON; the file is whole at any time."""
        found = asdict(self)
        parts = found.pop("parts")
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps({**found.pop("about"), **found, **parts}, indent=1) + "\n")
        os.replace(unfinished, path)


Part = Callable[[Findings], None]
"""Measures something and puts it into the findings."""


def run_parts(parts: Mapping[str, Part], findings: Findings, report: Path) -> None:
    """One after the other; the report is written after each."""
    for name, measure in parts.items():
        say(f"== {name}")
        with findings.parts.make(name):
            measure(findings)
        say(f"== {name}: {findings.parts.seconds[name]:.0f} s")
        findings.write(report)
        gc.collect()
