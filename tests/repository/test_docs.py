"""Generated pages are current, and links, settings, tests and metrics that pages name exist."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest
from prometheus_client import REGISTRY

from schemas.job import JobRequest
from services.cli.main import cli
from services.process import telemetry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
SETTING = re.compile(r"\bLORAQ_[A-Z0-9_]+\b")
TARGET = re.compile(r"\bmake ([a-z]+)\b")


def module_from(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = module_from("folders")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return module_from("generate")


def test_generated_pages_are_current(generator: ModuleType) -> None:
    for name, content in generator.pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, f"docs/{name}: run `make reference`"


def test_the_table_of_folders_has_every_folder_with_its_first_line() -> None:
    """Entry points and lines change with every commit: `make reference` writes them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    written = page.split(folders.BEGIN)[1].split(folders.END)[0]
    assert _first_columns(written) == _first_columns(folders.table()), "run `make reference`"


def _first_columns(table: str) -> list[list[str]]:
    return [row.split(" | ")[:2] for row in table.splitlines()]


def test_the_page_of_settings_masks_no_default(generator: ModuleType) -> None:
    assert "***" not in generator.configuration()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    missing = [link for link in LINK.findall(prose) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_only_settings_that_exist(page: Path, generator: ModuleType) -> None:
    known = set(SETTING.findall(generator.configuration()))
    named = set(SETTING.findall(page.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_only_targets_of_the_makefile(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`|^    (.+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    named = {target for pair in code for target in TARGET.findall(" ".join(pair))}
    assert named
    assert named <= targets


@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda record: record.stem)
def test_decision_records_are_short_and_end_with_when_to_reopen_them(record: Path) -> None:
    lines = record.read_text(encoding="utf-8").strip().splitlines()
    assert len(lines) <= 15
    assert any(line.startswith("Reopen if ") for line in lines[-4:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_pages_name_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/.-]+)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    for path, function in named:
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{function}"


def test_metrics_of_the_operations_page_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = {name.removesuffix("_total") for name in re.findall(r"`((?:loraq|gen_ai|messaging)_[a-z_]+)", page)}
    prefixes = ("loraq_", "gen_ai_", "messaging_")
    registered = {family.name for family in REGISTRY.collect() if family.name.startswith(prefixes)}
    assert telemetry.ALARMS
    assert named
    assert named <= registered


def test_the_readmes_record_is_a_valid_job_request() -> None:
    records = re.findall(r"^    (\{.*?\}\})$", README, re.MULTILINE | re.DOTALL)
    assert len(records) == 1
    assert JobRequest.model_validate_json(records[0]).adapter == "support-tone"


def test_options_in_the_readmes_commands_exist() -> None:
    lines = re.findall(r"^    loraq ([a-z &]+?)((?: [-./\"][^#\n]*)?)(?:#.*)?$", README, re.MULTILINE)
    assert lines
    for words, options in lines:
        for words_of_one in words.split("&"):
            command: click.Command = cli
            for word in words_of_one.replace("loraq", "").split():
                if isinstance(command, click.Group):
                    found = command.get_command(click.Context(command), word)
                    assert found is not None, word
                    command = found
            known = {flag for parameter in command.params for flag in parameter.opts}
            assert set(re.findall(r"--[a-z-]+", options)) <= known
