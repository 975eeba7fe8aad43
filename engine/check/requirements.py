"""The requirements of `make gpu-check`; exit code 2 if one is missing.

`python3 engine/check/requirements.py` runs where the engine cannot be imported: it needs only the standard library.
"""

from __future__ import annotations  # so that a Python that is too old can still parse it

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Version = tuple[int, int]

EXIT_MISSING = 2
PYTHON: Version = (3, 11)
TORCH: Version = (2, 8)
COMPILERS = ("cc", "gcc", "clang")


def missing_requirements() -> list[str]:
    """A sentence per missing requirement."""
    found = (sys.version_info.major, sys.version_info.minor)
    return [*missing_python(found), *missing_torch(installed("torch")), *missing_triton(), *missing_compiler()]


def main() -> int:
    """Print what is missing; returns 0 or 2."""
    missing = missing_requirements()
    sys.stderr.write(format_missing(missing))
    return EXIT_MISSING if missing else 0


def format_missing(sentences: list[str]) -> str:
    """One line per sentence."""
    return "".join(f"gpu-check: {sentence}.\n" for sentence in sentences)


def missing_python(found: Version) -> Iterator[str]:
    """Older versions lack parts of the standard library that the engine uses."""
    if found < PYTHON:
        needed = f"Python {_dotted(PYTHON)} or newer is required"
        yield f"{needed}, this is {_dotted(found)}; select another with PYTHON=/path/to/python3.12"


def missing_torch(found: str | None) -> Iterator[str]:
    """Older versions cannot return the float32 accumulators of a product of 16-bit matrices."""
    if found is None:
        yield "torch is not installed; install it with CUDA"
    elif parsed(found) < TORCH:
        yield f"torch {_dotted(TORCH)} or newer is required, this is {found}; install a newer version"


def missing_triton() -> Iterator[str]:
    """The kernels need a version with `triton.knobs`."""
    if find_spec("triton") is None:
        yield "triton is not installed; it comes with torch for CUDA"
    elif find_spec("triton.knobs") is None:
        yield f"triton {installed('triton')} has no triton.knobs; install the version that belongs to a newer torch"


def missing_compiler() -> Iterator[str]:
    """triton compiles its kernel launchers on the machine."""
    if "CC" not in os.environ and not any(shutil.which(name) for name in COMPILERS):
        yield "no C compiler was found, and triton needs one; install gcc (Debian: apt-get install gcc) or set CC"


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parsed(version: str) -> Version:
    """(major, minor) of a version such as 2.8.0+cu126 or 2.8.0a0."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: Version) -> str:
    return ".".join(str(number) for number in version)


if __name__ == "__main__":
    sys.exit(main())
