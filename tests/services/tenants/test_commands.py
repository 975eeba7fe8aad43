"""The commands for tenants, adapters and endpoints, with readable output and with --json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.cli.main import main
from services.process.settings import Settings
from services.tenants.tenants import unknown_tenant
from tests.processes import loraq, settings_environment, spawn
from tests.services.conftest import MakeAdapter


class Ran(NamedTuple):
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.stdout.splitlines()]


Run = Callable[..., Ran]


@pytest.fixture
def run(settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `loraq …` in this process, without a registrar."""
    monkeypatch.chdir(tmp_path)
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


def test_secrets_of_a_new_tenant_are_shown_once(run: Run) -> None:
    added = run("tenants", "add", "acme", "--json")
    assert added.status == 0
    (line,) = added.lines
    assert line["webhook_secret"].startswith("whsec_")
    assert line["producer_key"]
    shown = run("tenants", "show", "acme")
    assert line["webhook_secret"] not in shown.stdout
    listed = run("tenants", "list", "--json").lines
    assert [(row["tenant"], row["adapters"]) for row in listed] == [("acme", 0)]
    human = run("tenants", "add", "globex")
    assert "whsec_" in human.stdout
    assert "not shown again" in human.stderr


def test_adding_a_tenant_twice_is_an_error(run: Run) -> None:
    run("tenants", "add", "acme")
    again = run("tenants", "add", "acme")
    assert again == Ran(1, "", "loraq: tenant acme already exists; see `loraq tenants show acme`\n")


def test_adding_a_tenant_needs_the_secret_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAQ_SECRET_KEY")
    failed = run("tenants", "add", "acme")
    assert failed.status == 1
    assert "LORAQ_SECRET_KEY is not set" in failed.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenants", "show", "nobody"),
        ("adapters", "list", "--tenant", "nobody"),
        ("adapters", "show", "tone", "--tenant", "nobody"),
        ("adapters", "disable", "tone", "--tenant", "nobody"),
        ("endpoints", "add", "main", "https://example.com/hook", "--tenant", "nobody"),
        ("endpoints", "list", "--tenant", "nobody"),
        ("endpoints", "remove", "main", "--tenant", "nobody"),
        ("jobs", "--tenant", "nobody"),
        ("jobs", "show", "01930000-0000-7000-8000-000000000000", "--tenant", "nobody"),
    ],
)
def test_the_error_for_an_unknown_tenant_names_the_command_to_add_it(run: Run, arguments: tuple[str, ...]) -> None:
    failed = run(*arguments)
    assert failed == Ran(1, "", "loraq: there is no tenant nobody; add it with `loraq tenants add nobody`\n")


def test_adapters_are_pushed_listed_shown_and_changed(run: Run, adapter_dir: MakeAdapter) -> None:
    run("tenants", "add", "acme")
    common = ("--tenant", "acme", "--json")
    for seed in (1, 2):
        pushed = run("adapters", "push", adapter_dir(f"v{seed}", seed=seed), "--name", "tone", "--no-wait", *common)
        assert pushed.status == 0, pushed.stderr
        (line,) = pushed.lines
        assert (line["name"], line["version"], line["status"], line["created"]) == ("tone", seed, "pending", True)
    assert [row["version"] for row in run("adapters", "list", "--json").lines] == [2, 1]
    assert "tone" in run("adapters", "list").stdout
    assert run("adapters", "disable", "tone@1", "--reason", "Too rude.", *common).lines[0]["versions"] == [1]
    (shown,) = run("adapters", "show", "tone@1", *common).lines
    assert (shown["status"], shown["status_reason"]) == ("disabled", "Too rude.")
    human = run("adapters", "show", "tone", "--tenant", "acme").stdout
    assert "Too rude." in human
    assert shown["digest"] in human
    assert run("adapters", "enable", "tone", *common).lines[0]["versions"] == [1]
    assert run("adapters", "pin", "tone", *common).lines[0]["versions"] == [1, 2]
    assert [row["pinned"] for row in run("adapters", "show", "tone", *common).lines] == [True, True]
    assert run("adapters", "unpin", "tone@2", *common).lines[0]["versions"] == [2]
    absent = run("adapters", "show", "tone@9", "--tenant", "acme")
    assert absent == Ran(1, "", "loraq: acme has no adapter tone@9: it has tone@2, tone@1\n")
    assert run("adapters", "pin", "ton", "--tenant", "acme").stderr.endswith("ton: did you mean tone?\n")
    assert "see `loraq adapters list" in run("adapters", "show", "other", "--tenant", "acme").stderr


def test_a_push_without_a_registrar_suggests_to_start_one(run: Run, adapter_dir: MakeAdapter) -> None:
    run("tenants", "add", "acme")
    pushed = run("adapters", "push", adapter_dir(), "--name", "tone", "--tenant", "acme", "--timeout", "0.3")
    assert pushed.status == 1
    assert "is `loraq registrar` running?" in pushed.stderr


def test_a_push_of_a_directory_without_an_adapter_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    failed = run("adapters", "push", tmp_path, "--name", "tone", "--tenant", "acme")
    assert failed.status == 1
    assert "adapter_config.json does not exist" in failed.stderr


def test_endpoints_are_added_listed_and_removed(run: Run) -> None:
    run("tenants", "add", "acme")
    tenant = ("--tenant", "acme")
    assert run("endpoints", "add", "main", "https://example.com/hook", *tenant).status == 0
    assert run("endpoints", "add", "main", "https://example.com/hook", *tenant).status == 0
    other = run("endpoints", "add", "main", "https://example.com/other", *tenant)
    assert "remove it first" in other.stderr
    assert "is not a webhook address" in run("endpoints", "add", "bad", "ftp://example.com", *tenant).stderr
    (row,) = run("endpoints", "list", *tenant, "--json").lines
    assert (row["name"], row["url"]) == ("main", "https://example.com/hook")
    assert run("endpoints", "remove", "main", *tenant).status == 0
    assert run("endpoints", "list", *tenant, "--json").lines == []
    assert run("endpoints", "add", "main", "https://example.com/other", *tenant).status == 0


def test_an_endpoint_that_would_be_blocked_is_registered_with_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tenants", "add", "acme")
    added = run("endpoints", "add", "inside", "http://127.0.0.1:8080/hook", "--tenant", "acme", "--json")
    assert (added.status, added.lines[0]["name"]) == (0, "inside")
    assert added.stderr.startswith("Webhooks to 127.0.0.1 will be blocked")
    assert "LORAQ_WEBHOOK_ALLOW_NETWORKS" in added.stderr
    assert "port 25" in run("endpoints", "add", "mail", "http://example.com:25/", "--tenant", "acme").stderr
    monkeypatch.setenv("LORAQ_WEBHOOK_ALLOW_NETWORKS", '["127.0.0.0/8"]')
    assert run("endpoints", "add", "inside", "http://127.0.0.1:8080/hook", "--tenant", "acme").stderr == ""


def test_with_a_registrar_a_push_waits_until_it_is_admitted_or_rejected(
    settings_with_base: Settings, adapter_dir: MakeAdapter
) -> None:
    settings = settings_with_base
    assert loraq("tenants", "add", "acme", settings=settings).returncode == 0
    with spawn(["registrar"], settings) as registrar:
        good = loraq("adapters", "push", str(adapter_dir()), "--tenant", "acme", "--name", "tone", settings=settings)
        assert (good.returncode, good.stderr) == (0, "")
        assert good.stdout.startswith("tone@1 of acme is ready (rank 4: ")
        broken = adapter_dir("broken", targets=("q_proj",), target_modules=["v_proj"])
        bad = loraq("adapters", "push", str(broken), "--tenant", "acme", "--name", "broken", settings=settings)
        assert bad.returncode == 1
        assert bad.stderr.startswith("loraq: broken@1 was rejected: tensor ")
        assert registrar.stop() == 0


def test_a_registrar_without_a_base_model_ends_at_once(settings: Settings) -> None:
    ended = loraq("registrar", settings=settings)
    assert ended.returncode == 1
    assert "LORAQ_BASE_MODEL is not set" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["", "ÄCME", "two words"])
def test_an_invalid_tenant_name_is_not_suggested_for_adding(name: str) -> None:
    assert str(unknown_tenant(name)) == f"{name!r} is not a valid tenant name; see `loraq tenants list`"


def test_limits_of_a_tenant_are_shown_changed_and_cleared(run: Run) -> None:
    run("tenants", "add", "acme")
    unlimited = {
        "tenant": "acme",
        "weight": 1.0,
        "running": None,
        "queued": None,
        "tokens_per_s": None,
        "burst": None,
        "over_limit": "wait",
    }
    assert run("tenants", "limits", "acme", "--json").lines == [unlimited]
    changed = unlimited | {"weight": 4.0, "running": 2, "tokens_per_s": 50.0, "burst": 90.0, "over_limit": "refuse"}
    given = ("--weight", 4, "--running", 2, "--tokens-per-s", 50, "--burst", 90, "--over-limit", "refuse")
    assert run("tenants", "limits", "acme", *given, "--json").lines == [changed]
    assert run("tenants", "limits", "acme", "--queued", 7, "--clear", "weight", "--json").lines == [
        changed | {"queued": 7, "weight": 1.0}
    ]
    human = run("tenants", "limits", "acme")
    assert "tokens_per_s" in human.stdout
    assert run("tenants", "limits", "acme", "--clear", "all", "--json").lines == [unlimited]


def test_limits_that_cannot_be_are_refused(run: Run) -> None:
    run("tenants", "add", "acme")
    assert "there is no tenant nobody" in run("tenants", "limits", "nobody", "--running", 1).stderr
    assert "set --tokens-per-s" in run("tenants", "limits", "acme", "--burst", 5).stderr
    both = run("tenants", "limits", "acme", "--running", 1, "--clear", "running")
    assert "--clear and --running contradict each other" in both.stderr
    assert run("tenants", "limits", "acme", "--tokens-per-s", "nan").status != 0
    assert run("tenants", "limits", "acme", "--weight", 0).status != 0
    assert run("tenants", "limits", "acme", "--json").lines[0]["running"] is None
