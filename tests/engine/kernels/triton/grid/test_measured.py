"""What `gpu_check` measures: launches that are recorded first and started afterwards."""

import pytest
import torch

from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton import TritonKernels
from engine.kernels.triton.gpu_check import run_all
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.shapes import ModelShape
from engine.kernels.triton.workload import adapter_tables, torch_loop, workload
from tests.engine.kernels.triton.grid.device import FP32, OnDevice

TINY = ModelShape("tiny", 1, 128, 2, 1, 64, 192, 500)


@pytest.mark.parametrize("tokens", [[1, 2, 1], [40, 3, 30]], ids=["decode", "prefill"])
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_recorded_launches_compute_what_the_torch_loop_does(kernels: OnDevice, tokens: list[int], group: str) -> None:
    tables = adapter_tables(TINY, [8, 16, 40], FP32, kernels.device)
    work = workload(TINY, group, tables, tokens, FP32)
    expected, started = work.y.clone(), list[Launch]()
    torch_loop(work, expected, work.lora.segments.tolist())
    TritonKernels(started.append).lora_apply(work.y, work.x, work.sizes, work.lora, 0, work.projection)
    run_all(started)
    assert {launch.name for launch in started} == {"list_items", "shrink", "expand"}
    assert error(work.y.cpu(), expected.cpu()) < TOLERANCE[FP32]
    assert torch.isfinite(work.y).all()
