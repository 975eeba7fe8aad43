"""All that a run has found so far. A part that fails leaves its traceback, and the others go on."""

import gc
import json
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.check.say import say
from engine.check.suite import EngineReport, PeftReport
from engine.kernels.triton.gpu_check import KernelReport


@dataclass
class Findings:
    """By part; None, or an empty report, where a part was not asked for or has failed. `errors` are tracebacks."""

    about: Mapping[str, str]
    tests_exit_code: int | None = None
    kernels: KernelReport | None = None
    engine: EngineReport = field(default_factory=EngineReport)
    peft: PeftReport | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every result is right, whatever the speeds."""
        is_wrong = self.kernels is not None and not self.kernels.worst_error < 1
        return int(bool(self.errors) or bool(self.tests_exit_code) or is_wrong)

    def write(self, path: Path) -> None:
        """As JSON; the file is whole at any time."""
        found = asdict(self)
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps({**found.pop("about"), **found}, indent=1) + "\n")
        os.replace(unfinished, path)


Part = Callable[[Findings], None]
"""Measures something and puts it into the findings."""


def run_parts(parts: Mapping[str, Part], findings: Findings, report: Path) -> None:
    """One after the other; the report is written after each."""
    for name, measure in parts.items():
        say(f"== {name}")
        try:
            measure(findings)
        except Exception:  # any: what the others find is worth as much, and the exit code tells
            findings.errors[name] = traceback.format_exc()
            say(findings.errors[name])
        findings.write(report)
        gc.collect()
