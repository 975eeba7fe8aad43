"""Missing requirements are reported in one sentence each, before anything runs."""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from engine.check import requirements
from engine.check.gpu import main


def test_this_machine_meets_the_requirements() -> None:
    assert requirements.missing_requirements() == []


def test_it_needs_no_packages() -> None:
    """With -S, Python does not even find those that are installed."""
    done = subprocess.run([sys.executable, "-S", requirements.__file__], capture_output=True, text=True)
    assert done.returncode == requirements.EXIT_MISSING
    assert "gpu-check: torch is not installed" in done.stderr


def test_an_old_python_and_an_old_torch_are_reported_with_the_required_version() -> None:
    [python] = requirements.missing_python((3, 10))
    assert "Python 3.11 or newer is required, this is 3.10" in python
    assert list(requirements.missing_python((3, 14))) == []
    [torch] = requirements.missing_torch("2.7.1+cu128")
    assert "torch 2.8 or newer is required, this is 2.7.1+cu128" in torch
    assert "not installed" in next(requirements.missing_torch(None))
    for version in ("2.8.0a0+git", "2.13.0+cu130", "3.0"):
        assert list(requirements.missing_torch(version)) == []


def test_missing_packages_are_reported_and_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*_: object) -> None:
        return None

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "find_spec", nothing)
    monkeypatch.setattr(requirements, "version", unknown)
    monkeypatch.setattr(shutil, "which", nothing)
    monkeypatch.delenv("CC", raising=False)
    assert main([]) == requirements.EXIT_MISSING
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is")[0].split(" was")[0] for line in lines] == [
        "gpu-check: torch",
        "gpu-check: triton",
        "gpu-check: no C compiler",
    ]


def test_a_triton_without_knobs_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if "knobs" in name else name)
    [sentence] = requirements.missing_triton()
    assert "has no triton.knobs" in sentence
