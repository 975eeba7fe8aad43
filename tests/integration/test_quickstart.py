"""The commands of docs/quickstart.md run in order and print what the page shows."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 500


@dataclass
class Step:
    """One block of commands, and the lines that the page shows below it; … matches anything."""

    commands: str
    shown: list[str]

    def missing_from(self, output: str) -> list[str]:
        return [line for line in self.shown if not re.search(_pattern(line), output, re.MULTILINE)]


def _pattern(line: str) -> str:
    words = [r"\s+".join(map(re.escape, part.split())) for part in line.split("…")]
    return r"^\s*" + ".*".join(words)


def read_steps(page: str) -> list[Step]:
    steps: list[Step] = []
    for language, body in FENCE.findall(page):
        if language == "sh":
            steps.append(Step(body, []))
        else:
            steps[-1].shown += body.splitlines()
    return steps


STEPS = read_steps(PAGE)


@pytest.fixture
def clone(tmp_path: Path, base_model_dir: Path) -> Path:
    """The parts of a clone after `make demo` that the page uses."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


@pytest.fixture
def shell(clone: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A bash in its own session that runs the page's script; killed at the end with everything that it started."""
    scratch = clone / "scratch"
    scratch.mkdir()
    (clone / "script").write_text(_script(), encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LORAQ_")}
    with (clone / "output").open("wb") as output:
        bash = subprocess.Popen(
            ["/bin/bash", clone / "script"],
            cwd=clone,
            env=variables | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    yield bash
    for directory in scratch.glob("*/.loraq"):
        subprocess.run([sys.executable, "-m", "services.cli.main", "down", "--dir", directory], check=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(bash.pid, signal.SIGKILL)
    bash.wait()


def _script() -> str:
    """The page's blocks with a marker line after each; the first failing command ends it and prints the logs."""
    blocks = [f"{step.commands}\necho ':: step {number}'\n" for number, step in enumerate(STEPS)]
    return "set -euo pipefail\ntrap 'tail -n 40 *.log' ERR\n" + "".join(blocks)


@pytest.mark.timeout(TIMEOUT_S + 100)
def test_the_commands_of_the_page_work_as_written(shell: "subprocess.Popen[bytes]", clone: Path) -> None:
    try:
        shell.wait(TIMEOUT_S)
    finally:
        output = (clone / "output").read_text(encoding="utf-8", errors="replace")
        print(output)
    assert shell.returncode == 0
    pieces = re.split(r"^:: step \d+\n", output, flags=re.MULTILINE)
    assert len(pieces) == len(STEPS) + 1
    for step, piece in zip(STEPS, pieces, strict=False):
        assert step.missing_from(piece) == []


def test_the_page_shows_every_command() -> None:
    commands = "".join(step.commands for step in STEPS)
    for part in ("up", "tenants add", "adapters push", "worker", "dispatcher", "registrar", "listen", "submit", "down"):
        assert re.search(rf"^loraq {part}\b", commands, re.MULTILINE), part
    assert "psql" in commands


def test_every_command_on_the_page_is_in_a_block_that_runs() -> None:
    languages = {language for language, _ in FENCE.findall(PAGE)}
    assert languages == {"sh", "text"}
    assert not re.search(r"^    \S", FENCE.sub("", PAGE), re.MULTILINE)
