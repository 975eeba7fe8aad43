"""`loraq` finds its commands, starts fast, and reports errors in one line."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from services.cli.main import COMMANDS, cli
from services.process.environment import unknown_variables
from services.process.locks import try_lock


def _loraq(*arguments: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_and_has_a_help_text(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help
    assert COMMANDS[name][1].endswith(".")


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


@pytest.mark.parametrize("name", ["LORAQ_LANES", "LORAQ_WEBHOOK_ALLOW_NETWORKS", "LORAQ_WEBHOOK_RETRY_DELAYS_S"])
def test_a_list_that_is_not_json_is_named_with_an_example(name: str, tmp_path: Path) -> None:
    failed = _loraq("migrate", directory=tmp_path, **{name: "standard,batch"})
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"loraq: {name}: it is not a JSON list; write it as [")
    assert failed.stderr.endswith("]\n")


def test_an_unknown_setting_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    misspelt = {"LORAQ_WEBHOOK_ALLOWED_NETWORK": "[]", "LORAQ_KERNEL_CACHE": str(tmp_path), "LORAQ_POOL": "default"}
    warned = _loraq("down", directory=tmp_path, **misspelt)
    assert warned.returncode == 0
    first = warned.stderr.splitlines()[0]
    assert first.startswith(
        "loraq: LORAQ_WEBHOOK_ALLOWED_NETWORK (did you mean LORAQ_WEBHOOK_ALLOW_NETWORKS?): unknown setting"
    )
    assert "KERNEL_CACHE" not in first
    process = _loraq("dispatcher", directory=tmp_path, LORAQ_POOOL="x")
    assert process.stderr.count("did you mean LORAQ_POOL?") == 1
    assert unknown_variables(["LORAQ_POOL", "loraq_pool", "HOME"]) is None


def test_without_a_stack_the_error_suggests_loraq_up(tmp_path: Path) -> None:
    failed = _loraq("tenants", "add", "acme", directory=tmp_path)
    assert failed.returncode == 1
    assert f"there is no .loraq/stack.env in {tmp_path}: run `loraq up` here" in failed.stderr
    process = _loraq("dispatcher", directory=tmp_path)
    assert process.returncode == 1
    assert "run `loraq up` here" in process.stderr


def test_if_the_stack_of_the_settings_is_down_the_error_says_so(tmp_path: Path) -> None:
    stack = tmp_path / ".loraq"
    stack.mkdir()
    (stack / "stack.env").write_text("LORAQ_DATABASE_URL=postgresql://127.0.0.1:1/loraq\n")
    hint = "the settings come from .loraq/stack.env, whose stack is not running: run `loraq up`"
    assert hint in _loraq("jobs", directory=tmp_path).stderr
    (stack / "supervisor.lock").touch()
    assert hint in _loraq("jobs", directory=tmp_path).stderr
    lock = try_lock(stack / "supervisor.lock")
    assert lock is not None
    with lock:
        assert "loraq up" not in _loraq("jobs", directory=tmp_path).stderr


def test_if_the_environment_names_a_server_the_error_does_not_suggest_loraq_up(tmp_path: Path) -> None:
    failed = _loraq("jobs", directory=tmp_path, LORAQ_DATABASE_URL="postgresql://127.0.0.1:1/loraq")
    assert failed.returncode == 1
    assert "127.0.0.1:1" in failed.stderr
    assert "loraq up" not in failed.stderr


def test_help_lists_every_command_without_truncation(tmp_path: Path) -> None:
    shown = _loraq("--help", directory=tmp_path)
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)
    assert "..." not in shown.stdout.partition("Commands:")[2]


def test_help_imports_neither_torch_nor_a_client_library(tmp_path: Path) -> None:
    heavy = "{'torch', 'aiokafka', 'boto3', 'transformers'}"
    script = (
        "import sys; from services.cli.main import main\n"
        "try: main(['--help'])\n"
        f"finally: print('imported:', sorted({heavy} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "imported: []" in shown.stdout
