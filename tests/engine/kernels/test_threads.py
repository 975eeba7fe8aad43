"""The number of threads never changes a result."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import CpuKernels
from tests.engine.kernels.cases import (
    MIXED_RANKS,
    Shapes,
    adapter_tables,
    lora_batch,
    random_matrix,
    sequences,
    slots_by_popularity,
)

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def restored_thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_threads(num_threads: int, run: Callable[[], Tensor]) -> Tensor:
    torch.set_num_threads(num_threads)
    return run()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_adapters(cpu: CpuKernels, dtype: torch.dtype) -> None:
    shapes = Shapes(576, 192, 1536)
    k, sizes, first = shapes.group("qkv")
    packed = cpu.pack_linear([random_matrix(n, k, dtype, n) for n in sizes])
    lora = lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots_by_popularity("zipf", 133, len(MIXED_RANKS)))
    x = random_matrix(133, k, dtype, 1)

    def run() -> Tensor:
        out = torch.empty(133, sum(sizes), dtype=dtype)
        cpu.lora_linear(x, packed, lora, 1, first, out)
        cpu.lora_apply(out, x, sizes, lora, 0, first)
        return out

    assert torch.equal(with_threads(1, run), with_threads(3, run))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(cpu: CpuKernels, dtype: torch.dtype) -> None:
    case = sequences([(0, 63), (0, 1), (30, 7), (133, 3)], dtype)
    q = random_matrix(case.num_tokens, case.num_heads * case.kv.head_dim, dtype, 1)

    def run() -> Tensor:
        out = torch.empty_like(q)
        cpu.paged_attention(q, case.kv, 1, case.batch, case.num_heads, 0.125, out)
        return out

    assert torch.equal(with_threads(1, run), with_threads(3, run))
