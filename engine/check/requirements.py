"""What a machine must have before anything is checked on it; exit code 2 where something is missing.

`python3 engine/check/requirements.py` runs where the engine's package cannot be imported: imports are Python's own.
"""

from __future__ import annotations  # so that a Python which is too old can still read it

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Version = tuple[int, int]

CANNOT = 2
PYTHON: Version = (3, 11)
TORCH: Version = (2, 8)
COMPILERS = ("cc", "gcc", "clang")


def missing_requirements() -> list[str]:
    """A sentence for each; empty when all is there."""
    found = (sys.version_info.major, sys.version_info.minor)
    return [*missing_python(found), *missing_torch(installed("torch")), *missing_triton(), *missing_compiler()]


def main() -> int:
    """Tell what is missing; 0 or 2."""
    lacking = missing_requirements()
    sys.stderr.write(told(lacking))
    return CANNOT if lacking else 0


def told(sentences: list[str]) -> str:
    """A line for each."""
    return "".join(f"gpu-check: {sentence}.\n" for sentence in sentences)


def missing_python(found: Version) -> Iterator[str]:
    """An older one lacks what the engine uses of the standard library."""
    if found < PYTHON:
        needed = f"Python {_words(PYTHON)} or newer is needed"
        yield f"{needed}, this is {_words(found)}; name another by PYTHON=/path/to/python3.12"


def missing_torch(found: str | None) -> Iterator[str]:
    """An older one cannot give the float32 accumulators of a product of 16-bit matrices."""
    if found is None:
        yield "torch is not installed; install it with CUDA"
    elif parsed(found) < TORCH:
        yield f"torch {_words(TORCH)} or newer is needed, this is {found}; install a newer one"


def missing_triton() -> Iterator[str]:
    """`triton.knobs` came with the versions that the kernels are written for."""
    if find_spec("triton") is None:
        yield "triton is not installed; it comes with torch for CUDA"
    elif find_spec("triton.knobs") is None:
        yield f"triton {installed('triton')} has no triton.knobs; install the one that belongs to a newer torch"


def missing_compiler() -> Iterator[str]:
    """triton compiles the code that starts a kernel on the machine itself."""
    if "CC" not in os.environ and not any(shutil.which(name) for name in COMPILERS):
        yield "no C compiler is found, and triton needs one; install gcc (Debian: apt-get install gcc) or set CC"


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parsed(version: str) -> Version:
    """The first two numbers, of 2.8.0+cu126 as of 2.8.0a0."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _words(version: Version) -> str:
    return ".".join(str(number) for number in version)


if __name__ == "__main__":
    sys.exit(main())
