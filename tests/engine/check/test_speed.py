"""What the speed measurements include and exclude, on a tiny model with the CPU as the device."""

import gzip
import json
import os
from pathlib import Path

import pytest

from engine import CheckedAdapter, Engine, EngineConfig
from engine.check.speed import Case, adapter_names, load_adapters, measure_case, measure_overlap, trace_arrival
from engine.device import CpuDevice
from engine.device.backend import Backend
from engine.kernels import fallback, load_cpu_kernels
from tests.builders import lora_adapter, tiny_llama

pytestmark = pytest.mark.skipif(
    load_cpu_kernels() is fallback and "CI" not in os.environ, reason="the torch fallback does not support padding rows"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = tmp_path_factory.mktemp("speed")
    model = tiny_llama(root / "model")
    config = EngineConfig(model, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=2**23, max_batch_size=6)
    engine = Engine(config, Backend(CpuDevice(), load_cpu_kernels(), is_remote=True))
    load_adapters(engine, [lora_adapter(root / str(rank), model, rank=rank) for rank in (2, 4)], adapter_names(4))
    return engine


def test_a_directory_is_checked_once_for_all_of_its_names(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checks = lora_adapter(tmp_path / "a", engine.config.model_dir, rank=3), list[Path | str]()

    def check(directory: Path | str) -> CheckedAdapter:
        checks.append(directory)
        return Engine.check_adapter(engine, directory)

    monkeypatch.setattr(engine, "check_adapter", check)
    load_adapters(engine, [path], ["x", "y", "z"])
    assert checks == [path]
    assert {"x", "y", "z"} <= set(engine.adapters)


def test_a_case_leaves_the_engine_idle(engine: Engine) -> None:
    speed = measure_case(engine, Case(3, 2, 12), 4, lambda: None)
    assert speed.prefill_tokens_per_s > 0
    assert speed.decode_tokens_per_s > 0
    assert not engine.has_work


def test_timed_cold_adapters_load_from_the_host_tier(engine: Engine) -> None:
    """Each loads twice: from its file, untimed, and then from the host tier."""
    before = engine.adapter_traffic.loads
    found = measure_overlap(engine, Case(3, 2, 12), ["2", "3"], 4, lambda: None)
    assert engine.adapter_traffic.loads > before
    assert found.adapter_bytes > 0
    assert min(found.quiet_step_s, found.busy_step_s, found.arrival_s) > 0
    assert found.arrival_s > found.busy_step_s / 2
    assert not engine.has_work


def test_the_trace_contains_steps_during_a_transfer(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    trace_arrival(engine, Case(3, 2, 12), "3", lambda: None, path)
    with gzip.open(path, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    assert any("index_copy" in str(event.get("name")) for event in events)
    assert not engine.has_work
