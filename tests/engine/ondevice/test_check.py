"""What `make gpu-check` measures of the engine, on the device: a tiny model, so only that it ends well is shown."""

from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig
from engine.check.speed import Case
from engine.check.suite import EngineReport, Scale, measure_engine
from engine.kernels.triton.measure.shapes import ModelShape
from tests.engine.ondevice.engines import INTERPRETED, backend_for, sampling_only, without_logits

TINY = Scale(
    shape=ModelShape("tiny", 1, 64, 2, 1, 32, 64, 64),
    device="cuda",
    dtype="bfloat16",
    ranks=(4, 8),
    cases=(Case(2, 0, 2), Case(2, 2, 2)),
    peft=Case(2, 2, 2),
    overlap=Case(2, 2, 2),
    cold=1,
    cold_rank=4,
    decode_steps=1,
    peft_steps=1,
    pool_bytes=2**21,
    host_bytes=2**22,
)


def test_every_measure_of_the_engine_is_made(tmp_path: Path) -> None:
    """Where tensors have to be and what must not be read back is asked of every step, of the kernels only to sample."""
    report = EngineReport()

    def make(config: EngineConfig, **options: Any) -> Engine:
        engine = Engine(config, backend_for(config, sampling_only()), **options)
        return without_logits(engine, config.max_batch_size)

    def wait() -> None:
        if not INTERPRETED:
            torch.cuda.synchronize()

    measure_engine(report, TINY, tmp_path, make, wait, tmp_path / "trace.json.gz")
    assert report.attempts.errors == {}
    assert len(report.rows) == 2
    assert report.invariant is not None
    assert report.lora_stream is not None
    assert report.overlap is not None
