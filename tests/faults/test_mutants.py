"""Each mutant can still be patched into the product; a change to the patched code must update the mutant."""

import subprocess
import sys
from pathlib import Path

from tests.faults.mutant_runs import EXPERIMENT_OF
from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PROGRAM = "from tests.faults.mutants import MUTANTS\nfor mutant in MUTANTS.values():\n    mutant()"


def test_every_mutant_can_be_applied() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)


def test_every_mutant_has_an_experiment_that_exposes_it() -> None:
    assert EXPERIMENT_OF.keys() == MUTANTS.keys()
