"""The measuring command, as far as a machine without a GPU can show it."""

from collections.abc import Callable

import pytest
import torch

from engine.kernels import reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton.gpu_check import RESOLUTION_S, less_the_start
from engine.kernels.triton.shapes import ModelShape
from engine.kernels.triton.workload import Padded, Workload, adapter_tables, gathered_products, torch_loop, workload

TINY = ModelShape("tiny", 1, 128, 2, 1, 64, 192, 500)
FP32 = torch.float32


def expected(work: Workload) -> torch.Tensor:
    y = work.y.clone()
    reference.lora_apply(y, work.x, work.sizes, work.lora, 0, work.projection)
    return y


@pytest.mark.parametrize("group", TINY.groups)
def test_what_the_kernels_are_measured_against_computes_the_same(group: str) -> None:
    tables = adapter_tables(TINY, [8, 16, 40], FP32, "cpu")
    work = workload(TINY, group, tables, [1, 4, 2], FP32)
    y = work.y.clone()
    torch_loop(work, y, work.lora.segments.tolist())
    assert error(y, expected(work)) < TOLERANCE[FP32]
    y = work.y.clone()
    gathered_products(work, Padded.of(work), y, torch.tensor([0, 1, 1, 1, 1, 2, 2]))
    assert error(y, expected(work)) < TOLERANCE[FP32]


def test_what_starting_takes_is_not_counted() -> None:
    def timer(work: Callable[[], object]) -> float:
        took = work()
        assert isinstance(took, float)
        return took

    seconds = less_the_start(timer, lambda: 4e-6)
    assert seconds(lambda: 10e-6) == pytest.approx(6e-6)
    assert seconds(lambda: 3e-6) == RESOLUTION_S
