"""`loraq simulate`, as a person runs it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from services.errors import InputError
from services.simulate.commands import simulate

SIZES = ["--jobs", "300", "--adapters", "30", "--tenants", "3", "--batch", "8"]
SMALL = [*SIZES, "--prompt", "100", "0.3", "--output", "20", "0.3"]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(simulate, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def reports(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def test_policies_are_compared_on_one_trace() -> None:
    first, ours, bound = reports(*SMALL, "--policy", "first-come", "--policy", "loraq", "--policy", "500")
    assert [report["policy"] for report in (first, ours, bound)] == ["first-come", "loraq", "bound 500"]
    assert first["jobs"] == ours["jobs"] == 300
    assert first["model"] == "every step"
    assert first["lanes"]["standard"]["passed_tokens"] == 0
    assert bound["lanes"]["standard"]["passed_tokens"] <= 500
    assert first["tier_loads"]["store"] == 30, "every adapter comes from the store once"


def test_the_table_shows_policies_and_lanes() -> None:
    shown = run(*SMALL, "--lanes", "interactive=1,batch=1", "--workers", "3", "--detail", "aggregated").stdout
    assert shown.startswith("300 jobs, aggregated steps\n")
    assert "unbounded" in shown
    assert "interactive" in shown


def test_a_saved_trace_is_served_like_the_drawn_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run(*SMALL, "--rate", "50", "--save-trace", path)
    drawn = reports(*SMALL, "--rate", "50", "--policy", "loraq")
    saved = reports("--trace", path, "--batch", "8", "--policy", "loraq")
    assert saved[0]["loads"] == drawn[0]["loads"]
    assert saved[0]["lanes"]["standard"]["total_p50_s"] == pytest.approx(
        drawn[0]["lanes"]["standard"]["total_p50_s"], rel=0.01
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool-gb", "0.0001"], "holds no page of this model; raise --pool-gb"),
        (["--pool-gb", "0.1", "--ranks", "64"], "a job and its adapter need 0.373 GB, the pool has 0.0986"),
        (["--known-gb", "0.01"], "raise --known-gb"),
        (["--validate", __file__], "--validate needs --calibrate"),
        (["--validate", __file__, "--calibrate", __file__], "a run that calibrates cannot validate"),
        (["--since", "2000-01-01"], "LORAQ"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "--since":
        monkeypatch.setenv("LORAQ_DATABASE_URL", "no-url")
    with pytest.raises(Exception, match=message):
        CliRunner().invoke(simulate, [*SMALL, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "arguments", [("--ranks", "0"), ("--lanes", "slow=1"), ("--policy", "best"), ("--zipf", "nan"), ("--lanes", "")]
)
def test_bad_options_are_refused_in_one_sentence(arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(simulate, [*SMALL, *arguments])
    assert result.exit_code == 2
    assert "Error: Invalid value for" in result.output


def test_charts_need_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"--plot needs matplotlib; in the clone: pip install -e '\.\[plots\]'"):
        run(*SMALL, "--plot", tmp_path)


def test_charts_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    run(*SMALL, "--plot", tmp_path / "charts")
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {
        f"{name}.png" for name in ("throughput", "loads", "adapters-per-step", "hit-rate", "latency")
    }
