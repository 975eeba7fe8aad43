"""Shrink and expand over pages against the reference; scratch and pages without an adapter are NaN."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from engine.kernels import LoraBatch, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.layout import padded_rank
from engine.kernels.triton.lora import RankBound
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
from tests.engine.kernels.triton.grid.device import BF16, DTYPES, FP16, FP32, OnDevice, grid

SHAPES = {"64": Shapes(64, 64, 128), "576": Shapes(576, 192, 1536), "odd": Shapes(100, 20, 75)}
LAYER = 1
NUM_SLOTS = len(MIXED_RANKS)

QUICK = [
    (BF16, 1, "identical", "64", "qkv"),
    (BF16, 3, "distinct", "64", "gate_up"),
    (BF16, 7, "skewed", "odd", "qkv"),
    (BF16, 63, "zipf", "64", "o"),
    (BF16, 133, "uniform", "64", "down"),
    (BF16, 7, "uniform", "576", "o"),
    (FP16, 7, "uniform", "64", "qkv"),
    (FP16, 133, "identical", "odd", "o"),
    (FP32, 63, "distinct", "odd", "gate_up"),
    (FP32, 133, "skewed", "64", "o"),
]
FULL = [
    *product(DTYPES, TOKENS, POPULARITIES, ["64"], GROUPS),
    *product(DTYPES, [7, 133], ["distinct", "identical"], ["576", "odd"], GROUPS),
]


def step(shapes: Shapes, dtype: torch.dtype, slots: list[int]) -> LoraBatch:
    return lora_batch(adapter_tables(MIXED_RANKS, shapes, dtype), slots)


def untouched(lora: LoraBatch, sizes: tuple[int, ...], first: int, num_tokens: int) -> Tensor:
    """Mask of the values of y that must not change: rows without an adapter, projections that an adapter lacks."""
    kept = torch.ones(num_tokens, sum(sizes), dtype=torch.bool)
    for (start, end), slot in zip(pairwise(lora.segments.tolist()), lora.segment_slots.tolist(), strict=True):
        column = 0
        for index, size in enumerate(sizes):
            if slot >= 0 and lora.tables.parts[slot, LAYER, first + index, 1] > 0:
                kept[start:end, column : column + size] = False
            column += size
    return kept


@pytest.mark.parametrize(("dtype", "num_tokens", "popularity", "hidden", "group"), grid(QUICK, FULL))
def test_apply_equals_the_reference_and_repeats_bit_for_bit(
    kernels: OnDevice, dtype: torch.dtype, num_tokens: int, popularity: str, hidden: str, group: str
) -> None:
    shapes = SHAPES[hidden]
    lora = step(shapes, dtype, slots_by_popularity(popularity, num_tokens, NUM_SLOTS))
    k, sizes, first = shapes.group(group)
    x, before = random_matrix(num_tokens, k, dtype, num_tokens), random_matrix(num_tokens, sum(sizes), dtype, 2)
    expected, y, again = before.float().clone(), before.clone(), before.clone()
    reference.lora_apply(expected, x, sizes, lora, LAYER, first)
    kernels.lora_apply(y, x, sizes, lora, LAYER, first)
    kernels.lora_apply(again, x, sizes, lora, LAYER, first)
    assert error(y, expected) < TOLERANCE[dtype]
    assert torch.equal(y, again)
    kept = untouched(lora, sizes, first, num_tokens)
    assert torch.equal(y[kept], before[kept])


@pytest.mark.parametrize("y_dtype", [BF16, FP32])
def test_the_fused_product_is_the_base_product_plus_the_adapters(kernels: OnDevice, y_dtype: torch.dtype) -> None:
    shapes = SHAPES["odd"]
    lora = step(shapes, BF16, [-1, 0, 0, 2, 3])
    k, sizes, first = shapes.group("qkv")
    packed = kernels.pack_linear([random_matrix(n, k, BF16, 500 + i, k**-0.5) for i, n in enumerate(sizes)])
    x, base, y = random_matrix(5, k, BF16, 1), *(torch.full((5, sum(sizes)), torch.nan, dtype=y_dtype) for _ in "by")
    kernels.linear(x, packed, base)
    kernels.lora_linear(x, packed, lora, LAYER, first, y)
    expected = base.float().clone()
    reference.lora_apply(expected, x, sizes, lora, LAYER, first)
    assert error(y, expected) < TOLERANCE[y_dtype]
    assert torch.equal(y[[0, 3]], base[[0, 3]])


@pytest.mark.parametrize("rank", grid([1, 40, 128], [1, 8, 16, 24, 64, 100, 128]))
def test_every_rank_is_read_completely(kernels: OnDevice, rank: int) -> None:
    shapes = SHAPES["64"]
    tables = adapter_tables([(0, 0, 0, rank, 0, 0, 0)], shapes, FP32)
    assert tables.parts[0, LAYER, 3, 1] == padded_rank(rank)
    lora = lora_batch(tables, [0, 0])
    x, y = random_matrix(2, 64, FP32, 1), torch.zeros(2, 64)
    expected = torch.zeros(2, 64)
    reference.lora_apply(expected, x, (64,), lora, LAYER, 3)
    kernels.lora_apply(y, x, (64,), lora, LAYER, 3)
    assert error(y, expected) < TOLERANCE[FP32]


def test_input_and_output_may_be_columns_of_wider_buffers(kernels: OnDevice) -> None:
    lora = step(SHAPES["64"], FP32, [0, 0, 3])
    x, y = random_matrix(3, 200, FP32, 1)[:, 50:114], random_matrix(3, 300, FP32, 2)
    before, expected = y.clone(), y[:, 70:134].clone()
    reference.lora_apply(expected, x, (64,), lora, LAYER, 3)
    kernels.lora_apply(y[:, 70:134], x, (64,), lora, LAYER, 3)
    assert error(y[:, 70:134], expected) < TOLERANCE[FP32]
    assert torch.equal(y[:, :70], before[:, :70])
    assert torch.equal(y[:, 134:], before[:, 134:])


def test_tables_without_adapters_and_empty_steps_change_nothing(kernels: OnDevice) -> None:
    shapes = SHAPES["64"]
    nothing = lora_batch(adapter_tables([(0,) * 7], shapes, FP32), [0, 0])
    y = random_matrix(2, 64, FP32, 2)
    before = y.clone()
    kernels.lora_apply(y, random_matrix(2, 64, FP32, 1), (64,), nothing, LAYER, 3)
    kernels.lora_apply(y[:0], y[:0], (64,), step(shapes, FP32, []), LAYER, 3)
    assert torch.equal(y, before)


def test_in_decode_a_token_has_the_same_result_alone_and_in_any_mix(kernels: OnDevice) -> None:
    shapes, slots = SHAPES["64"], slots_by_popularity("uniform", 24, NUM_SLOTS)
    tables = adapter_tables(MIXED_RANKS, shapes, BF16)
    x = random_matrix(24, 64, BF16, 5)
    mixed = torch.zeros(24, 64, dtype=BF16)
    kernels.lora_apply(mixed, x, (64,), lora_batch(tables, slots), LAYER, 3)
    for token in (0, 7, 15, 23):
        alone = torch.zeros(1, 64, dtype=BF16)
        kernels.lora_apply(alone, x[token : token + 1], (64,), lora_batch(tables, slots[token : token + 1]), LAYER, 3)
        assert torch.equal(alone[0], mixed[token])


def test_a_larger_rank_in_a_table_written_in_place_is_detected(kernels: OnDevice) -> None:
    shapes = SHAPES["64"]
    small, large = (adapter_tables([(0, 0, 0, rank, 0, 0, 0)], shapes, FP32) for rank in (8, 40))
    bound = RankBound()
    parts = small.parts.clone().to(kernels.device)
    assert bound.of(parts) == 16
    with torch.inference_mode():
        parts.copy_(large.parts)
    assert bound.of(parts) == 48
    assert bound.of(small.parts) == 16
