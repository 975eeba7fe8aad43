"""`loraq` finds its commands, stays quick, and says in one line what is wrong."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from services.cli import COMMANDS, cli


def _loraq(*arguments: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_and_says_what_it_does(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help


def test_an_unknown_command_is_a_usage_error(tmp_path: Path) -> None:
    refused = _loraq("serve", directory=tmp_path)
    assert refused.returncode == 2
    assert "serve" in refused.stderr


def test_a_bad_setting_ends_the_command_with_one_line_that_names_it(tmp_path: Path) -> None:
    failed = _loraq("migrate", directory=tmp_path, LORAQ_PARTITIONS="none")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("loraq: LORAQ_PARTITIONS: ")
    assert failed.stderr.count("\n") == 1


def test_help_imports_neither_torch_nor_a_client_library(tmp_path: Path) -> None:
    heavy = "{'torch', 'aiokafka', 'boto3', 'transformers'}"
    script = (
        "import sys; from services.cli import main\n"
        "try: main(['--help'])\n"
        f"finally: print('imported:', sorted({heavy} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "imported: []" in shown.stdout
