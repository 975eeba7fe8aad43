"""Shrink and expand over pages, fused into the base product and standalone."""

import pytest
import torch
from torch import Tensor

from engine.kernels import Kernels, LoraBatch, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.cpu import CpuKernels
from tests.engine.kernels.cases import (
    GROUPS,
    MIXED_RANKS,
    POPULARITIES,
    TOKENS,
    Shapes,
    adapter_tables,
    lora_batch,
    random_matrix,
    slots_by_popularity,
)

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = {"64": Shapes(64, 64, 128), "576": Shapes(576, 192, 1536), "odd": Shapes(100, 20, 75)}
LAYER = 1


def weights(shapes: Shapes, group: str, dtype: torch.dtype) -> list[Tensor]:
    k, sizes, first = shapes.group(group)
    return [random_matrix(n, k, dtype, 500 + first + i, k**-0.5) for i, n in enumerate(sizes)]


def run_fused(kernels: Kernels, shapes: Shapes, group: str, x: Tensor, lora: LoraBatch, dtype: torch.dtype) -> Tensor:
    _, sizes, first = shapes.group(group)
    out = torch.full((len(x), sum(sizes)), float("nan"), dtype=x.dtype if kernels is not reference else torch.float32)
    kernels.lora_linear(x, kernels.pack_linear(weights(shapes, group, dtype)), lora, LAYER, first, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_equals_the_reference_for_every_popularity_and_size(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, popularity: str
) -> None:
    shapes = SHAPES["64"]
    lora = lora_batch(
        adapter_tables(MIXED_RANKS, shapes, dtype), slots_by_popularity(popularity, num_tokens, len(MIXED_RANKS))
    )
    for group in GROUPS:
        x = random_matrix(num_tokens, shapes.group(group)[0], dtype, num_tokens)
        actual = run_fused(kernels, shapes, group, x, lora, dtype)
        assert error(actual, run_fused(reference, shapes, group, x, lora, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", ["576", "odd"])
def test_equals_the_reference_at_real_and_odd_widths(kernels: Kernels, dtype: torch.dtype, hidden: str) -> None:
    shapes = SHAPES[hidden]
    lora = lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots_by_popularity("uniform", 63, len(MIXED_RANKS)))
    for group in GROUPS:
        x = random_matrix(63, shapes.group(group)[0], dtype, 1)
        actual = run_fused(kernels, shapes, group, x, lora, dtype)
        assert error(actual, run_fused(reference, shapes, group, x, lora, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("y_dtype", DTYPES, ids=str)
def test_apply_adds_to_the_existing_output(kernels: Kernels, dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    shapes = SHAPES["odd"]
    k, sizes, first = shapes.group("qkv")
    lora = lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots_by_popularity("zipf", 63, len(MIXED_RANKS)))
    x, y = random_matrix(63, k, dtype, 1), random_matrix(63, sum(sizes), y_dtype, 2)
    expected = y.float()
    reference.lora_apply(expected, x, sizes, lora, LAYER, first)
    base_rows = [t for t, slot in enumerate(slots_by_popularity("zipf", 63, len(MIXED_RANKS))) if slot == -1]
    before = y.clone()
    kernels.lora_apply(y, x, sizes, lora, LAYER, first)
    assert error(y, expected) < TOLERANCE[y_dtype]
    assert torch.equal(y[base_rows], before[base_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_rows_without_an_adapter_equal_the_base_product_bit_for_bit(
    compiled: CpuKernels, dtype: torch.dtype, group: str
) -> None:
    shapes = SHAPES["576"]
    slots = [-1] * 9 + [1] * 5 + [2] * 4 + [3] * 9  # slot 2 has no projection at all
    x = random_matrix(len(slots), shapes.group(group)[0], dtype, 1)
    mixed = run_fused(compiled, shapes, group, x, lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots), dtype)
    base = torch.empty_like(mixed)
    compiled.linear(x, compiled.pack_linear(weights(shapes, group, dtype)), base)
    untouched = [t for t, slot in enumerate(slots) if slot in (-1, 2)]
    assert torch.equal(mixed[untouched], base[untouched])
    assert not torch.equal(mixed, base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_a_token_has_the_same_result_alone_and_in_any_mix(compiled: CpuKernels, dtype: torch.dtype, group: str) -> None:
    shapes = SHAPES["576"]
    tables = adapter_tables(MIXED_RANKS, shapes, dtype)
    slots = slots_by_popularity("uniform", 63, len(MIXED_RANKS))
    x = random_matrix(63, shapes.group(group)[0], dtype, 5)
    mixed = run_fused(compiled, shapes, group, x, lora_batch(tables, slots), dtype)
    for token in range(0, 63, 4):
        alone = run_fused(compiled, shapes, group, x[token : token + 1], lora_batch(tables, [slots[token]]), dtype)
        assert torch.equal(alone[0], mixed[token])
    half = run_fused(compiled, shapes, group, x[20:50], lora_batch(tables, slots[20:50]), dtype)
    assert torch.equal(half, mixed[20:50])


def test_results_do_not_depend_on_the_contents_of_scratch_memory(cpu: CpuKernels) -> None:
    shapes, dtype = SHAPES["64"], torch.bfloat16
    lora = lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots_by_popularity("uniform", 33, len(MIXED_RANKS)))
    x = random_matrix(33, 64, dtype, 5)
    first = run_fused(cpu, shapes, "qkv", x, lora, dtype)
    cpu.poison_scratch(1 << 16)
    assert torch.equal(run_fused(cpu, shapes, "qkv", x, lora, dtype), first)


def test_adapters_are_read_directly_from_the_pool(cpu: CpuKernels) -> None:
    shapes, dtype = SHAPES["64"], torch.float32
    lora = lora_batch(adapter_tables([(8,) * 7], shapes, dtype), [0, 0])
    x = random_matrix(2, 64, dtype, 5)
    before = run_fused(cpu, shapes, "o", x, lora, dtype)
    pool = lora.tables.pool
    pool.view(dtype).mul_(2)  # A and B both double; NaN in unused pages stays NaN
    base, after = torch.empty_like(before), run_fused(cpu, shapes, "o", x, lora, dtype)
    cpu.linear(x, cpu.pack_linear(weights(shapes, "o", dtype)), base)
    assert lora.tables.pool.data_ptr() == pool.data_ptr()
    assert (
        error(after - base, 4 * (before - base)) < TOLERANCE[dtype] * 10
    )  # the difference of close numbers loses digits
