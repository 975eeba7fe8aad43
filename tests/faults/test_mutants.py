"""Each defect can still be patched into the product: whoever changes what it changes brings it up to date."""

import subprocess
import sys
from pathlib import Path

from tests.faults.mutant_runs import SHOWN_BY
from tests.faults.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PROGRAM = "from tests.faults.mutants import MUTANTS\nfor mutant in MUTANTS.values():\n    mutant()"


def test_every_mutant_can_be_made() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)


def test_every_mutant_has_an_experiment_that_shows_it() -> None:
    assert SHOWN_BY.keys() == MUTANTS.keys()
