"""Calibration with runs of the real engine, and the comparison with another."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.bench.commands import bench
from services.errors import InputError
from services.simulate.measured import calibrate, read_run
from services.simulate.validation import compare
from tests.builders import tiny_llama

SIZES = ["--pool-bytes", "3000000", "--batch", "4", "--prompt-len", "20", "--new-tokens", "12"]
BOUNDS = ["--bound", "200", "--bound", "1500"]


def measured(path: Path, *arguments: str) -> Path:
    result = CliRunner().invoke(bench, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    path.write_text(result.stdout.splitlines()[-1])
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("base") / "tiny-llama"))


@pytest.fixture(scope="module")
def runs(base: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two real runs: other queues, adapters and seeds."""
    directory = tmp_path_factory.mktemp("runs")
    given = ["scheduling", "--model", base, *SIZES, *BOUNDS]
    return [
        measured(directory / "a.json", *given, "--adapters", "24", "--jobs", "120", "--seed", "0"),
        measured(directory / "b.json", *given, "--adapters", "40", "--jobs", "160", "--seed", "7"),
    ]


def test_the_simulator_makes_the_decisions_of_a_real_run(runs: list[Path]) -> None:
    """Times are the machine's and are not compared here; which adapters are loaded and batched is the policy's."""
    rows = list(compare(read_run(runs[1]), calibrate(runs[:1])))
    assert {row.policy for row in rows} == {"first come", "bound 200", "bound 1500"}
    for row in rows:
        assert row.simulated > 0
        if row.measure in ("loads", "adapters_per_step"):
            assert abs(row.off) <= 0.15, row


def test_costs_of_steps_and_reads_are_what_was_measured(runs: list[Path]) -> None:
    calibration, run = calibrate(runs[:1]), read_run(runs[0])
    equations = list(run.equations())
    fitted = sum(calibration.steps.seconds(each.work) for each in equations)
    assert fitted == pytest.approx(sum(each.seconds for each in equations), rel=0.25)
    assert 0 < calibration.read_byte_s < 1e-6


def test_runs_of_the_engine_s_benchmark_calibrate_too(base: str, tmp_path: Path) -> None:
    shapes = [(1, 4, 8, 1), (4, 8, 8, 3), (8, 8, 32, 2), (4, 16, 4, 1), (2, 4, 16, 2), (8, 16, 8, 8)]
    files = [
        measured(
            tmp_path / f"{index}.json",
            *("engine", "--model", base, "--repeats", "1", "--batch", str(batch), "--requests", str(requests)),
            *("--prompt-len", str(prompt), "--new-tokens", "6", "--distinct", str(distinct)),
        )
        for index, (batch, requests, prompt, distinct) in enumerate(shapes)
    ]
    assert calibrate(files).steps.step_s >= 0
    with pytest.raises(InputError, match="too alike to calibrate with"):
        calibrate(files[:1])


@pytest.mark.parametrize("content", ["", "nothing", "[1]", '{"a": 1}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    for read in (read_run, lambda path: calibrate([path])):
        with pytest.raises(InputError, match=r"other\.json"):
            read(path)


def test_a_run_without_loads_calibrates_nothing(runs: list[Path], tmp_path: Path) -> None:
    data: dict[str, Any] = json.loads(runs[0].read_text())
    for served in data["rounds"][0]:
        served["mb_loaded"] = 0.0
    path = tmp_path / "still.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="none of the files measured an adapter's load"):
        calibrate([path])
