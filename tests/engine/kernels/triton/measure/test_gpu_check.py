"""The kernel measurements, as far as they can be tested without a GPU."""

from collections.abc import Callable

import pytest
import torch

from engine.kernels import reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton.measure.cost import LARGE_BYTES, SMALL_EXTRA_S
from engine.kernels.triton.measure.gpu_check import RESOLUTION_S, Clock, without_launch_time
from engine.kernels.triton.measure.shapes import ModelShape
from engine.kernels.triton.measure.workload import (
    Padded,
    Workload,
    adapter_tables,
    gathered_products,
    torch_loop,
    workload,
)

TINY = ModelShape("tiny", 1, 128, 2, 1, 64, 192, 500)
FP32 = torch.float32


def expected(work: Workload) -> torch.Tensor:
    y = work.y.clone()
    reference.lora_apply(y, work.x, work.sizes, work.lora, 0, work.projection)
    return y


@pytest.mark.parametrize("group", TINY.groups)
def test_the_torch_versions_equal_the_reference(group: str) -> None:
    tables = adapter_tables(TINY, [8, 16, 40], FP32, "cpu")
    work = workload(TINY, group, tables, [1, 4, 2], FP32)
    y = work.y.clone()
    torch_loop(work, y, work.lora.segments.tolist())
    assert error(y, expected(work)) < TOLERANCE[FP32]
    y = work.y.clone()
    gathered_products(work, Padded.of(work), y, torch.tensor([0, 1, 1, 1, 1, 2, 2]))
    assert error(y, expected(work)) < TOLERANCE[FP32]


def test_each_launch_may_add_to_the_minimum_time() -> None:
    """Below 64 MB; from there the target is a share of the copy bandwidth, for any number of launches."""
    least = 1_000_000 / 1e12
    clock = Clock(lambda work: least + 1.5 * SMALL_EXTRA_S, 1e12)
    assert not clock.measure("shrink", "one", list, 1_000_000).reached
    assert clock.measure("lora_apply", "one", list, 1_000_000, launches=2).reached
    slow = Clock(lambda work: LARGE_BYTES / 0.6e12, 1e12)
    assert LARGE_BYTES == 64_000_000
    assert not slow.measure("lora_apply", "large", list, LARGE_BYTES, launches=2).reached


def test_the_launch_time_is_not_counted() -> None:
    def timer(work: Callable[[], object]) -> float:
        took = work()
        assert isinstance(took, float)
        return took

    seconds = without_launch_time(timer, lambda: 4e-6)
    assert seconds(lambda: 10e-6) == pytest.approx(6e-6)
    assert seconds(lambda: 3e-6) == RESOLUTION_S
