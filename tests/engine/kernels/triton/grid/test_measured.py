"""The launches that `gpu_check` measures, which are recorded first and run afterwards."""

import time
from collections.abc import Callable

import pytest
import torch

from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton import TritonKernels
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.measure.gpu_check import Clock, KernelScale, measure_kernels, run_all
from engine.kernels.triton.measure.shapes import ModelShape
from engine.kernels.triton.measure.workload import adapter_tables, torch_loop, workload
from tests.engine.kernels.triton.grid.device import FP32, OnDevice

TINY = ModelShape("tiny", 1, 128, 2, 1, 64, 192, 500)
LEAST = ModelShape("least", 1, 64, 1, 1, 64, 64, 64)


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


def test_every_kernel_is_measured_in_every_case(kernels: OnDevice) -> None:
    """With the host's clock, so the times are not meaningful."""

    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    cases = {"decode": ([8], [1]), "prefill": ([16], [17])}
    scale = KernelScale(LEAST, FP32, kernels.device, cases, requests=2, contexts=(5, 9))
    report = measure_kernels(scale, lambda: Clock(seconds, 1e9))
    assert report.worst_error < 1
    products = [f"{kernel} {group}" for group in LEAST.groups for kernel in ("shrink", "expand", "lora_apply")]
    names = [(case, name) for case in cases for name in products]
    names += [(f"context {context}", "attend, combine") for context in scale.contexts]
    assert [(found.case, found.kernel) for found in report.measurements] == names
    assert all(found.seconds > 0 for found in report.measurements)
    both = [found for found in report.measurements if found.kernel.startswith("lora_apply")]
    assert all(found.loop_factor is not None for found in both)
    assert {found.case for found in both if found.gathered_factor is not None} == {"decode"}
