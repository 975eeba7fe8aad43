"""Compiling the operators: once, atomically, and with a clear error if it is not possible."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels import KernelBuildError, fallback, load_cpu_kernels
from engine.kernels.cpu import build
from engine.kernels.memory import HUGE_PAGE_BYTES, huge_zeros

LOAD = "from engine.kernels.cpu.build import load_library; print(load_library(('-O0',)).linear.default)"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A loader without a cached library, and an empty cache directory."""
    monkeypatch.setattr(build, "_load", build._load.__wrapped__)
    monkeypatch.setenv("LORAQ_KERNEL_CACHE", str(tmp_path / "cache"))
    return monkeypatch


def test_two_concurrent_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "compiled"
    compiler = script(tmp_path / "compiler", f'case "$*" in *bindings*) echo one >> {log};; esac; exec g++ "$@"')
    environment = {**os.environ, "CXX": compiler, "LORAQ_KERNEL_CACHE": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert all("linear" in output for output in outputs)
    assert log.read_text().split() == ["one"]
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


def test_without_a_compiler_the_torch_fallback_is_used(
    fresh_load: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_load.setenv("PATH", str(tmp_path))
    fresh_load.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels.__wrapped__() is fallback
    assert "there is no C++ compiler on the PATH: install g++" in caplog.text


def test_the_error_quotes_a_compiler_that_fails(fresh_load: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_load.setenv("CXX", script(tmp_path / "compiler", "echo 'x.cpp:1: error: no such luck' >&2; exit 1"))
    with pytest.raises(KernelBuildError, match=r"could not compile the kernels: .*error: no such luck"):
        build.load_library()
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_error_names_a_cache_that_cannot_be_created(fresh_load: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fresh_load.setenv("LORAQ_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="Set LORAQ_KERNEL_CACHE"):
        build.load_library()


def test_huge_memory_is_aligned_zero_and_writable() -> None:
    memory = huge_zeros(3 * HUGE_PAGE_BYTES + 5)
    assert memory.shape == (3 * HUGE_PAGE_BYTES + 5,)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory.view(torch.uint8)[-1] = 7
    assert int(memory[-1]) == 7
