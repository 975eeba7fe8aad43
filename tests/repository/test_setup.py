"""The README's two commands, CI and the pinned requirements are consistent."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = {"runtime": [], "local": ["local"], "dev": ["local", "dev"]}
PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)$")


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").split("\n")[:-1]
    matches = [PIN.match(line) for line in lines]
    assert None not in matches, f"requirements/{name}.txt contains more than pins"
    return {canonicalize_name(m[1]): m[2] for m in matches if m}


@pytest.mark.parametrize("name", EXTRAS)
def test_every_dependency_is_pinned_within_its_bounds(name: str) -> None:
    pins = _pins(name)
    extras = [line for extra in EXTRAS[name] for line in PROJECT["optional-dependencies"][extra]]
    for line in PROJECT["dependencies"] + extras:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), f"{line}: run `make requirements`"


def test_larger_sets_include_the_smaller_ones_at_the_same_versions() -> None:
    runtime, local, dev = (_pins(name).items() for name in EXTRAS)
    assert runtime <= local <= dev


def test_excluded_packages_are_not_pinned() -> None:
    lines = (ROOT / "requirements" / "excludes.txt").read_text(encoding="utf-8").splitlines()
    excluded = {line for line in lines if not line.startswith("#")}
    assert excluded
    assert not excluded & _pins("dev").keys()


def test_every_dependency_has_a_reason() -> None:
    block = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("dependencies = [", 1)[1].split("\n]", 1)[0]
    assert all("#" in line for line in block.strip().splitlines())


def test_the_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"(?:^    .+\n)+", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^    (make \w+)", blocks[0], re.MULTILINE) == ["make demo", "make test"]


def test_ci_runs_the_readmes_test_command() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert run.read_text(encoding="utf-8").rstrip().splitlines()[-1] == "make test"


def _make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["demo", "test", "lint", "fmt", "bench", "up", "down", "reference", "clean"])
def test_make_has_the_target(target: str) -> None:
    planned = _make("-n", target)
    assert planned.returncode == 0, planned.stderr


def test_make_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac\n')
    old.chmod(0o755)
    for name in ("python3.11", "python3.12", "python3.13"):
        (tmp_path / name).symlink_to(old)
    refused = _make(f"VENV={tmp_path / 'venv'}", "demo", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert refused.returncode != 0
    assert "Python 3.11 or newer is needed; found Python 3.9.2" in refused.stderr


def test_make_names_a_missing_compiler(tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    (tmp_path / "make").symlink_to(make)
    refused = _make(f"VENV={tmp_path / 'venv'}", "demo", PATH=str(tmp_path), CXX="")
    assert refused.returncode != 0
    assert "make: no C++ compiler found; install g++ 12 or newer" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_pre_commit_hooks_run_the_tools_of_make_lint() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    hooks = set(re.findall(r"entry: \.venv/bin/(\S+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile.split("\nlint:", 1)[1].split("\n\n", 1)[0]
    assert hooks == set(re.findall(r"\$\(BIN\)/(\S+)", lint))


IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
for name in ("engine", "schemas", "services"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
"""


def test_no_import_needs_a_package_of_the_extras() -> None:
    """The image contains only the runtime requirements."""
    runtime, development = _pins("runtime"), _pins("dev")
    blocked = {
        name
        for name, holders in packages_distributions().items()
        if {canonicalize_name(holder) for holder in holders} <= development.keys() - runtime.keys()
    }
    assert {"psutil", "peft", "pytest"} <= blocked
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(blocked)]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert imported.returncode == 0, imported.stderr
