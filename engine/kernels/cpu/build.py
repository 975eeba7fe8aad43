"""Compile the C++ operators once per machine and load them.

The library's name contains a hash of sources, flags, compiler, torch version and CPU features, so a stale one is never
loaded. It is written atomically (temporary name, then rename), and processes that start together build it only once.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent
# No contraction: whether a * b + c is rounded once or twice must not depend on the function it is inlined into.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
COMPILERS = ("g++", "c++", "clang++")
LINK = ("-ltorch_cpu", "-lc10")
TIMEOUT_S = 300


class KernelBuildError(Exception):
    """The C++ operators cannot be compiled or loaded here; the message gives the reason and the remedy."""


def load_library(flags: Sequence[str] | None = None) -> Any:
    """The operators' torch namespace, built with `flags` (default FLAGS) if the cache has no such build."""
    return _load(tuple(FLAGS if flags is None else flags))


@functools.cache
def _load(flags: tuple[str, ...]) -> Any:
    compiler = find_compiler()
    key = _build_key(compiler, flags)
    namespace = f"loraq_{key}"
    library = cache_dir() / f"{namespace}.so"
    if not library.exists():
        with _lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, flags, namespace, library)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelBuildError(f"cannot load {library}: {error}. Delete the file to rebuild it.") from error
    return getattr(torch.ops, namespace)


def find_compiler() -> str:
    """$CXX, or the first of COMPILERS on the PATH."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise KernelBuildError("there is no C++ compiler on the PATH: install g++ 12 or newer, or set CXX.")


def cache_dir() -> Path:
    """$LORAQ_KERNEL_CACHE, or loraq/kernels in the user's cache directory."""
    if chosen := os.environ.get("LORAQ_KERNEL_CACHE"):
        path = Path(chosen)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraq" / "kernels"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(
            f"cannot create {path}: {error}. Set LORAQ_KERNEL_CACHE to a writable directory."
        ) from error
    return path


def _build_key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp", ".py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*flags, compiler, _version(compiler), torch.__version__, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    ).stdout


def _cpu_features() -> str:
    """The CPU's feature list, so that machines that share a home directory do not share builds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: Sequence[str], namespace: str, library: Path) -> None:
    try:
        _compile_into(library, compiler, flags, namespace)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"cannot build {library}: {error}") from error


def _compile_into(library: Path, compiler: str, flags: Sequence[str], namespace: str) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        define = f"-DLORAQ_NAMESPACE={namespace}"
        command = [compiler, *flags, *_torch_flags(), define, str(SOURCES / "bindings.cpp"), "-o", str(built), *LINK]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line][:3] or [result.stderr[-500:]]
            raise KernelBuildError(f"{compiler} could not compile the kernels: {'; '.join(errors)}")
        built.replace(library)


def _torch_flags() -> list[str]:
    from torch.utils import cpp_extension  # the import takes a second, and a cached build does not need it

    includes = [f for path in cpp_extension.include_paths() for f in ("-isystem", path)]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*["-std=c++20", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"], *includes, *libraries]
