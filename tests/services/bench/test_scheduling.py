"""The queue's policy on a real engine: one table row per bound, and the bound holds."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.bench.commands import bench
from tests.builders import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.mark.parametrize("store", [(), ("--store", "0.001", "1e9")])
def test_every_bound_is_compared_with_first_come(model: Path, store: tuple[str, ...]) -> None:
    sizes = ("--adapters", 12, "--jobs", 40, "--pool-bytes", 1_500_000, "--batch", 4, "--prompt-len", 4)
    bounds = ("--new-tokens", 4, "--bound", 16, "--bound", 80, "--repeats", 2)
    arguments = ["scheduling", "--model", model, *sizes, *bounds, *store, "--json"]
    result = CliRunner().invoke(bench, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    for first_come, tight, loose in report["rounds"]:
        assert first_come["passed_tokens"] == 0
        assert 0 < tight["passed_tokens"] <= 16
        assert 0 < loose["passed_tokens"] <= 80
        assert loose["loads"] <= first_come["loads"]
    assert set(report["ratios"]) == {"bound 16", "bound 80"}
    assert len(report["ranks"]) == 12
    for served in report["rounds"][0]:
        recording = served["recording"]
        prefill, rows, _, _, load_bytes, seconds = map(sum, zip(*recording["turns"], strict=True))
        assert (prefill, rows) == (40 * 4, 40 * 3)
        assert load_bytes == pytest.approx(served["mb_loaded"] * 1e6, abs=1e5)
        assert 0.5 * served["wall_s"] < seconds <= served["wall_s"] + 0.001
        assert len(recording["read_s"]) == served["loads"]
        assert len(recording["chosen"]) == 40
