"""One file per group of rows of the fault table."""

import importlib
import pkgutil


def load() -> None:
    """Import every module, which registers its experiments, and sort them by row number."""
    from tests.faults.experiment import EXPERIMENTS

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    ordered = sorted(EXPERIMENTS.items(), key=lambda item: (not item[0].isdigit(), item[0].zfill(9)))
    EXPERIMENTS.clear()
    EXPERIMENTS.update(ordered)
