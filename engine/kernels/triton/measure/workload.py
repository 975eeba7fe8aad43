"""A step of random adapters over a pool, and plain torch versions of it: a loop, and padded batched products."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.layout import column_tiles, matrix_of, padded_rank, tile_bytes
from engine.kernels.triton.measure.shapes import ModelShape
from engine.kernels.types import TILE_COLUMNS, TILE_RANKS, LoraBatch, LoraTables

Matrices = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Workload:
    """One fused group in a step: `x` [T, K], `y` [T, sum N], and a copy of each adapter's matrices."""

    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]
    projection: int
    lora: LoraBatch
    matrices: tuple[tuple[Matrices, ...], ...]


def adapter_tables(
    model: ModelShape, ranks: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0
) -> LoraTables:
    """One adapter per rank, on all seven projections, in one layer's pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    tiles_per_page = model.page_bytes(dtype) // tile_bytes(dtype)
    shapes = [(k, n) for k, sizes, _ in model.groups.values() for n in sizes]
    parts = torch.zeros(len(ranks), 1, len(shapes), 2, dtype=torch.int32)
    lengths = []
    for slot, rank in enumerate(ranks):
        tile = 0
        for index, (k, n) in enumerate(shapes):
            parts[slot, 0, index] = torch.tensor([tile, padded_rank(rank)])
            tile += padded_rank(rank) // TILE_RANKS * (column_tiles(k) + column_tiles(n))
        lengths.append(-(-tile // tiles_per_page))
    pages = torch.randperm(sum(lengths), generator=generator).to(torch.int32)
    adapter_pages = torch.zeros(len(ranks), max(lengths), dtype=torch.int32)
    for slot, own in enumerate(torch.split(pages, lengths)):
        adapter_pages[slot, : len(own)] = own
    values = torch.empty(1, len(pages), model.page_bytes(dtype) // dtype.itemsize, dtype=dtype, device=device)
    values.normal_(std=0.02)
    scales = torch.ones(len(ranks), 1, len(shapes), device=device)
    return LoraTables(values.view(torch.uint8), adapter_pages.to(device), parts.to(device), scales)


def workload(
    model: ModelShape, group: str, tables: LoraTables, tokens_per_adapter: Sequence[int], dtype: torch.dtype
) -> Workload:
    """A step in which adapter i has that many consecutive tokens."""
    device = tables.pool.device
    k, sizes, projection = model.groups[group]
    bounds = torch.tensor([0, *tokens_per_adapter]).cumsum(0).to(torch.int32)
    slots = torch.arange(len(tokens_per_adapter), dtype=torch.int32, device=device)
    num_tokens = int(bounds[-1])
    return Workload(
        x=torch.randn(num_tokens, k, dtype=dtype, device=device),
        y=torch.randn(num_tokens, sum(sizes), dtype=dtype, device=device),
        sizes=sizes,
        projection=projection,
        lora=LoraBatch(tables, bounds.to(device), slots),
        matrices=tuple(
            tuple(_matrices(tables, slot, projection + i, k, n, dtype) for i, n in enumerate(sizes))
            for slot in range(len(tokens_per_adapter))
        ),
    )


def _matrices(tables: LoraTables, slot: int, projection: int, k: int, n: int, dtype: torch.dtype) -> Matrices:
    per_page = tables.pool.shape[2] // tile_bytes(dtype)
    first, rank = tables.parts[slot, 0, projection].tolist()
    num_a, num_b = (rank // TILE_RANKS * column_tiles(columns) for columns in (k, n))
    index = torch.arange(first, first + num_a + num_b, device=tables.pool.device)
    pages = tables.adapter_pages[slot][index // per_page].long()
    tiles = tables.pool[0].view(dtype).view(-1, per_page, TILE_RANKS, TILE_COLUMNS)[pages, index % per_page]
    return (
        matrix_of(tiles[:num_a], rank, k),
        matrix_of(tiles[num_a:], rank, n),
        float(tables.scales[slot, 0, projection]),
    )


def torch_loop(work: Workload, y: Tensor, bounds: Sequence[int]) -> None:
    """y += s (x A^T) B, with two products per adapter and projection."""
    for (start, end), adapter in zip(pairwise(bounds), work.matrices, strict=True):
        for columns, (a, b, scale) in zip(torch.split(y[start:end], list(work.sizes), dim=1), adapter, strict=True):
            columns.addmm_(work.x[start:end] @ a.T, b, alpha=scale)


@dataclass(frozen=True)
class Padded:
    """All adapters' matrices stacked and padded to the largest rank: [adapters, K, R] and [adapters, R, N]."""

    down: tuple[Tensor, ...]
    up: tuple[Tensor, ...]

    @classmethod
    def of(cls, work: Workload) -> "Padded":
        """Stack a workload's matrices; B includes the scale."""
        rank = max(len(a) for adapter in work.matrices for a, _, _ in adapter)
        down, up = [], []
        for projection in zip(*work.matrices, strict=True):
            down.append(torch.stack([_to_rank(a, rank).T for a, _, _ in projection]))
            up.append(torch.stack([_to_rank(b * scale, rank) for _, b, scale in projection]))
        return cls(tuple(down), tuple(up))


def _to_rank(matrix: Tensor, rank: int) -> Tensor:
    padded = matrix.new_zeros(rank, matrix.shape[1])
    padded[: len(matrix)] = matrix
    return padded


def gathered_products(work: Workload, padded: Padded, y: Tensor, slots: Tensor) -> None:
    """y += (x A^T) B, with a copy of the adapter's padded matrices per token."""
    for columns, down, up in zip(torch.split(y, list(work.sizes), dim=1), padded.down, padded.up, strict=True):
        columns += torch.bmm(torch.bmm(work.x[:, None], down[slots]), up[slots])[:, 0]
