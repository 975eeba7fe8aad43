"""The command that checks and measures a GPU, as far as a machine without one can show it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.backend import Backend
from engine.check.gpu import pytest_command
from engine.check.speed import Case, requests_of
from engine.check.suite import EngineReport, Scale, engine_table, measure_engine
from engine.device import CpuDevice
from engine.kernels import fallback, load_cpu_kernels
from engine.kernels.triton.shapes import ModelShape

ROOT = Path(__file__).parents[3]
NOT_LISTED = ("boto3", "aiokafka", "asyncpg", "pydantic", "hypothesis", "pytest_asyncio", "pytest_timeout", "structlog")

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
    pool_bytes=2**23,
    host_bytes=2**23,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = subprocess.run([sys.executable, "-m", "engine.check.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> EngineReport:
    """Everything that is measured, on a tiny model, the CPU as the device."""
    if load_cpu_kernels() is fallback:
        pytest.skip("torch's own operators know no rows that are padding")
    backend = Backend(CpuDevice(), load_cpu_kernels(), is_remote=True)
    make_engine = partial(Engine, backend=backend)
    return measure_engine(TINY, tmp_path_factory.mktemp("check"), make_engine, lambda: None, None)


def test_every_case_is_measured_against_its_base(report: EngineReport) -> None:
    assert [row.speed.case for row in report.rows] == [case.name for case in TINY.cases]
    assert [row.of_base is None for row in report.rows] == [True, False, False, True, False]
    for row in report.rows:
        assert row.speed.prefill_tokens_per_s > 0
        assert row.speed.decode_tokens_per_s > 0
    assert all(0 < row.allowed < 1 for row in report.rows if row.allowed is not None)
    assert report.peft_tokens_per_s > 0
    assert report.invariant.decode_tokens_per_s > 0
    assert report.overlap.adapter_bytes > 0
    assert report.overlap.arrival_s > 0


def test_the_table_has_every_measure(report: EngineReport) -> None:
    text = engine_table(report)
    assert all(f"| {case.name} |" in text for case in TINY.cases)
    assert "batch_invariant" in text
    assert "PEFT" in text
    assert "cold adapter" in text


def test_prompts_are_the_same_in_every_run() -> None:
    case = Case(3, 2, 5)
    assert requests_of(case, 320, 1) == requests_of(case, 320, 1)
    assert [request.adapter for request in requests_of(case, 320, 1)] == ["0", "1", "0"]


def test_the_device_tests_are_found_with_the_listed_packages_alone(tmp_path: Path) -> None:
    """None of the libraries that the project's own tests need is imported, nor the project's settings read."""
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(f"import sys\nfor name in {NOT_LISTED!r}:\n    sys.modules[name] = None\n")
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    command = [
        *pytest_command(["tests/engine/kernels/triton/grid", "tests/engine/ondevice"], settings),
        "--collect-only",
    ]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{tmp_path}:.",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tests/engine/ondevice/test_engine.py" in done.stdout
    assert "test_lora.py" in done.stdout


def test_the_report_is_plain_json(report: EngineReport) -> None:
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(report)))["rows"][1]["speed"]["case"] == TINY.cases[1].name
