"""The command that checks and measures a GPU, as far as it can be tested without one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.check import suite
from engine.check.attempts import Attempts
from engine.check.device_tests import TIMED_OUT, run_device_tests
from engine.check.findings import Findings, run_parts
from engine.check.gpu import PARTS, main, part_functions
from engine.check.speed import Case, Speed, requests_of
from engine.check.suite import EngineReport, PeftReport, Scale, measure_engine, measure_peer
from engine.check.table import table
from engine.device import CpuDevice
from engine.device.backend import Backend
from engine.kernels import fallback, load_cpu_kernels
from engine.kernels.triton.measure.gpu_check import KernelReport, Measurement
from engine.kernels.triton.measure.shapes import ModelShape

ROOT = Path(__file__).parents[3]

TINY = Scale(
    shape=ModelShape("tiny", 2, 64, 4, 2, 16, 112, 320),
    device="cpu",
    dtype="float32",
    ranks=(4, 8),
    cases=(Case(4, 0, 12), Case(4, 2, 12), Case(4, 4, 12), Case(6, 0, 9), Case(6, 6, 9)),
    peft=Case(4, 4, 12),
    overlap=Case(3, 2, 12),
    cold=2,
    cold_rank=4,
    decode_steps=4,
    peft_steps=2,
    pool_bytes=2**23,
    host_bytes=2**23,
)
FEW_CASES = replace(TINY, cases=(Case(4, 0, 12), TINY.peft))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_reports_that_and_exits_with_2() -> None:
    done = subprocess.run([sys.executable, "-m", "engine.check.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.fixture(scope="module")
def make_engine() -> Callable[..., Engine]:
    """Builds engines with the CPU as the device."""
    # CI has a compiler, so a failed build must not be skipped there.
    if load_cpu_kernels() is fallback and "CI" not in os.environ:
        pytest.skip("the torch fallback does not support padding rows")
    return partial(Engine, backend=Backend(CpuDevice(), load_cpu_kernels(), is_remote=True))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, make_engine: Callable[..., Engine]) -> EngineReport:
    """All measurements, on a tiny model."""
    found, directory = EngineReport(), tmp_path_factory.mktemp("check")
    trace = directory / "trace.json.gz"
    measure_engine(found, TINY, directory, make_engine, lambda: None, trace)
    assert trace.exists()
    assert found.attempts.errors == {}
    return found


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> PeftReport:
    return measure_peer(TINY, tmp_path_factory.mktemp("peft"), lambda: None)


def test_every_case_is_measured_against_its_base(report: EngineReport, peft: PeftReport) -> None:
    assert [row.speed.case for row in report.rows] == [case.name for case in TINY.cases]
    assert [row.of_base is None for row in report.rows] == [True, False, False, True, False]
    for row in report.rows:
        assert row.speed.prefill_tokens_per_s > 0
        assert row.speed.decode_tokens_per_s > 0
    assert all(0 < row.allowed < 1 for row in report.rows if row.allowed is not None)
    assert peft.decode_tokens_per_s > 0
    assert report.invariant is not None
    assert report.overlap is not None
    assert report.lora_stream is not None
    assert report.invariant.decode_tokens_per_s > 0
    assert report.lora_stream.decode_tokens_per_s > 0
    assert report.overlap.adapter_bytes > 0
    assert report.overlap.arrival_s > 0


def test_the_table_has_every_measurement(report: EngineReport, peft: PeftReport) -> None:
    """The kernels' measurements run in the interpreter (grid/test_measured.py)."""
    found = Measurement("shrink o", "one", 5e-6, 2_000_000, 0.5, reached=False, loop_factor=3.25)
    text = table(Findings({}, 0, KernelReport(0.5, 4e12, [found]), report, peft))
    row = "| shrink o | one | 5.0 µs | 0.50 of a copy of 2.0 MB, torch loop 3.2x as long | missed |"
    assert row in text.splitlines()
    for case in TINY.cases:
        assert f"| prefill | {case.name} |" in text
        assert f"| decode | {case.name} |" in text
    for measure in (
        "tests on the device",
        "decode, batch_invariant",
        "decode, lora_stream",
        "decode, transformers + PEFT",
        "cold adapters during decode",
    ):
        assert f"| {measure} |" in text
    assert {line.count("|") for line in text.splitlines()} == {6}


def test_the_table_shows_where_the_time_went(report: EngineReport) -> None:
    seconds = {"tests": 61.4, "engine": 200.0, "peft": 60.0}
    lines = table(Findings({}, engine=report, parts=Attempts(seconds))).splitlines()
    [engine] = [line for line in lines if line.startswith("| time | engine | 200 s |")]
    assert all(name in engine for name in ("cases ", "overlap ", "batch_invariant ", "lora_stream ", "trace "))
    assert "| time | tests | 61 s |  |  |" in lines
    assert "| time | all parts | 321 s |  | reached |" in lines
    slow = table(Findings({}, parts=Attempts({"tests": 481.0})))
    assert "| time | all parts | 481 s |  | missed |" in slow


def test_a_failing_measurement_of_the_engine_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., Engine]
) -> None:
    """The table shows the reason, and the exit code reports the failure."""

    def fails(*_: object) -> None:
        raise RuntimeError("no room for cold adapters")

    monkeypatch.setattr(suite, "measure_overlap", fails)
    found = EngineReport()
    measure_engine(found, FEW_CASES, tmp_path, make_engine, lambda: None, tmp_path / "trace.json.gz")
    assert found.plain is not None
    assert found.invariant is not None
    assert found.overlap is None
    assert (tmp_path / "trace.json.gz").exists()
    assert set(found.attempts.errors) == {"overlap"}
    findings = Findings({}, engine=found)
    assert findings.exit_code == 1
    row = "| overlap | not completed | failed | RuntimeError: no room for cold adapters | missed |"
    assert row in table(findings).splitlines()


def test_prompts_are_the_same_in_every_run() -> None:
    case = Case(3, 2, 5)
    assert requests_of(case, 320, 1) == requests_of(case, 320, 1)
    assert [request.adapter for request in requests_of(case, 320, 1)] == ["0", "1", "0"]


def test_the_report_is_plain_json(report: EngineReport) -> None:
    assert json.loads(json.dumps(asdict(report)))["rows"][1]["speed"]["case"] == TINY.cases[1].name


def test_a_failing_part_is_reported_and_the_others_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its partial results are kept; the report is complete after each part."""
    path, findings = tmp_path / "report.json", Findings({"gpu": "none"})
    observed: list[object] = []

    def fails(into: Findings) -> None:
        observed.append(json.loads(path.read_text())["tests_exit_code"])
        into.engine.plain = Speed("some", 1.0, 2.0)
        raise RuntimeError("out of memory | at all")

    def succeeds(into: Findings) -> None:
        observed.append(json.loads(path.read_text())["errors"])
        into.peft = PeftReport("some", 4.0)

    run_parts({"tests": passes, "engine": fails, "peft": succeeds}, findings, path)
    written = json.loads(path.read_text())
    assert observed[0] == 0
    assert set(written["seconds"]) == {"tests", "engine", "peft"}
    assert "RuntimeError: out of memory | at all" in written["errors"]["engine"]
    assert observed[1] == written["errors"]
    assert (written["gpu"], written["kernels"], written["engine"]["plain"]["case"]) == ("none", None, "some")
    assert findings.exit_code == 1
    lines = table(findings).splitlines()
    assert "| engine | not completed | failed | RuntimeError: out of memory / at all | missed |" in lines
    assert {line.count("|") for line in lines} == {6}
    assert "Traceback" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def passes(findings: Findings) -> None:
    findings.tests_exit_code = 0


def test_the_exit_code_follows_from_the_results() -> None:
    assert Findings({}).exit_code == 0
    assert Findings({}, tests_exit_code=3).exit_code == 1
    assert Findings({}, kernels=KernelReport(0.5, 4e12, [])).exit_code == 0
    assert Findings({}, kernels=KernelReport(1.5, 4e12, [])).exit_code == 1
    assert Findings({}, kernels=KernelReport(float("nan"), 4e12, [])).exit_code == 1


def test_parts_are_selected_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(part_functions(tmp_path)) == PARTS
    with pytest.raises(SystemExit):
        main(["--only", "everything"])
    assert "--only" in capsys.readouterr().err
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run([make, "-n", "gpu-check", "ONLY=tests peft"], cwd=ROOT, capture_output=True, text=True)
    assert "engine.check.gpu --only tests --only peft" in done.stdout


def test_the_highest_exit_code_of_all_files_is_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, outcome in (("passing", "True"), ("failing", "False")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"def test_it() -> None:\n    assert {outcome}\n")
    assert run_device_tests([tmp_path / "passing", tmp_path / "failing"]) == 1
    printed = capsys.readouterr().out
    assert "1 passed" in printed
    assert "1 failed" in printed


def test_a_file_that_hangs_is_killed_and_its_output_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prints = "    with capsys.disabled():\n        print('so far', flush=True)\n"
    hangs = f"import threading\n\ndef test_it(capsys):\n{prints}    threading.Event().wait()\n"
    (tmp_path / "test_hangs.py").write_text(hangs)
    assert run_device_tests([tmp_path], max_seconds=15.0) == TIMED_OUT
    printed = capsys.readouterr().out
    assert "so far" in printed
    assert "test_hangs.py: killed by timeout after 15 s" in printed


def test_each_test_process_has_one_thread(tmp_path: Path) -> None:
    test = "import os\nimport torch\n\ndef test_it():\n    assert torch.get_num_threads() == 1"
    (tmp_path / "test_threads.py").write_text(f"{test}\n    assert os.environ['PYTHONUNBUFFERED'] == '1'\n")
    assert run_device_tests([tmp_path]) == 0
