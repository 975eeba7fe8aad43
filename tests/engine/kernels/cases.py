"""Pools, adapters and steps for kernel tests. Unwritten memory stays NaN, so that tests detect reads of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import PROJECTIONS, AttentionBatch, KvCache, LoraBatch, LoraTables
from engine.kernels.layout import padded_rank, tile_bytes, tiles_of

GROUPS = {"qkv": (0, 3), "o": (3, 1), "gate_up": (4, 2), "down": (6, 1)}
POPULARITIES = ("distinct", "uniform", "zipf", "identical", "skewed")
TOKENS = (1, 3, 7, 63, 133)


@dataclass(frozen=True)
class Shapes:
    """(K, N) of each projection, in the order of PROJECTIONS."""

    hidden: int
    kv: int
    mlp: int

    def of(self, projection: int) -> tuple[int, int]:
        h, kv, mlp = self.hidden, self.kv, self.mlp
        return ((h, h), (h, kv), (h, kv), (h, h), (h, mlp), (h, mlp), (mlp, h))[projection]

    def group(self, name: str) -> tuple[int, tuple[int, ...], int]:
        """(K, output sizes, first projection) of a fused group."""
        first, count = GROUPS[name]
        return self.of(first)[0], tuple(self.of(p)[1] for p in range(first, first + count)), first


def nan_pool(num_layers: int, num_pages: int, page_bytes: int) -> Tensor:
    return torch.full((num_layers, num_pages, page_bytes), 0xFF, dtype=torch.uint8)


def random_matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def adapter_tables(
    ranks: Sequence[Sequence[int]], shapes: Shapes, dtype: torch.dtype, num_layers: int = 2, tiles_per_page: int = 5
) -> LoraTables:
    """One slot per row of `ranks` (seven ranks, 0 = absent), its pages scattered over an otherwise NaN pool."""
    streams = [
        [_layer_stream(slot, layer, row, shapes, dtype) for layer in range(num_layers)]
        for slot, row in enumerate(ranks)
    ]
    pages_of = [max(math.ceil(len(tiles) / tiles_per_page) for tiles, _ in layers) for layers in streams]
    num_pages, max_pages = sum(pages_of) + 3, max(*pages_of, 1) + 1
    pool = nan_pool(num_layers, num_pages, tiles_per_page * tile_bytes(dtype))
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)).to(torch.int32)
    adapter_pages = torch.full((len(ranks), max_pages), -1, dtype=torch.int32)
    parts = torch.zeros(len(ranks), num_layers, 7, 2, dtype=torch.int32)
    for slot, layers in enumerate(streams):
        own, ids = ids[: pages_of[slot]], ids[pages_of[slot] :]
        adapter_pages[slot, : len(own)] = own
        for layer, (tiles, table) in enumerate(layers):
            parts[slot, layer] = table
            for index, tile in enumerate(tiles):
                page = pool[layer, own[index // tiles_per_page]].view(dtype).view(tiles_per_page, 8, 64)
                page[index % tiles_per_page] = tile
    scales = torch.rand(len(ranks), num_layers, 7, generator=torch.Generator().manual_seed(11)) + 0.5
    return LoraTables(pool, adapter_pages, parts, scales)


def _layer_stream(
    slot: int, layer: int, ranks: Sequence[int], shapes: Shapes, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    tiles: list[Tensor] = []
    table = torch.zeros(7, 2, dtype=torch.int32)
    for projection, rank in enumerate(ranks):
        if rank == 0:
            continue
        k, n = shapes.of(projection)
        table[projection] = torch.tensor([len(tiles), padded_rank(rank)])
        seed = slot * 1000 + layer * 100 + projection * 2
        tiles += tiles_of(random_matrix(rank, k, dtype, seed, k**-0.5))
        tiles += tiles_of(random_matrix(rank, n, dtype, seed + 1, rank**-0.5))
    return tiles, table


def slots_by_popularity(name: str, num_tokens: int, num_slots: int) -> list[int]:
    """The slot of each token, sorted; may include -1."""
    generator = torch.Generator().manual_seed(num_tokens)
    weights = {
        "uniform": torch.ones(num_slots + 1),
        "zipf": 1.0 / torch.arange(1, num_slots + 2),
        "skewed": torch.tensor([100.0] + [1.0] * num_slots),
    }
    if name == "distinct":
        return sorted(t % (num_slots + 1) - 1 for t in range(num_tokens))
    if name == "identical":
        return [num_slots - 1] * num_tokens
    drawn = torch.multinomial(weights[name], num_tokens, replacement=True, generator=generator)
    return sorted((num_slots - 1 - drawn).tolist())


def lora_batch(tables: LoraTables, slots: Sequence[int]) -> LoraBatch:
    """Segments over tokens that are already sorted by slot, plus one empty segment."""
    starts = [t for t in range(len(slots)) if t == 0 or slots[t] != slots[t - 1]]
    segments = torch.tensor([*starts, len(slots), len(slots)], dtype=torch.int32)
    segment_slots = torch.tensor([*(slots[t] for t in starts), 0], dtype=torch.int32)
    return LoraBatch(tables, segments, segment_slots)


MIXED_RANKS = (
    (8, 16, 0, 33, 1, 64, 5),
    (1, 1, 1, 1, 1, 1, 1),
    (0, 0, 0, 0, 0, 0, 0),
    (128, 4, 16, 8, 24, 0, 40),
    (0, 0, 32, 0, 0, 8, 0),
)
assert all(len(row) == len(PROJECTIONS) for row in MIXED_RANKS)


@dataclass(frozen=True)
class Sequences:
    """A step over sequences: (tokens already in KV, new tokens) of each."""

    kv: KvCache
    batch: AttentionBatch
    num_heads: int
    tokens_per_page: int

    @property
    def num_tokens(self) -> int:
        return int(self.batch.query_starts[-1])


def sequences(
    lengths: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    tokens_per_page: int = 16,
    num_layers: int = 2,
) -> Sequences:
    """The KV of every position visible to the step is random; the rest of the pool is NaN."""
    totals = [past + new for past, new in lengths]
    blocks = [math.ceil(total / tokens_per_page) for total in totals]
    page_values = 2 * num_kv_heads * tokens_per_page * head_dim
    pool = nan_pool(num_layers, sum(blocks) + 2, page_values * dtype.itemsize)
    ids = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    for sequence, count in enumerate(blocks):
        tables[sequence, :count], ids = ids[:count], ids[count:]
        for position in range(totals[sequence]):
            page = pool[:, tables[sequence, position // tokens_per_page]].view(dtype)
            page = page.view(num_layers, 2, num_kv_heads, tokens_per_page, head_dim)
            seed = 1000 * sequence + position
            values = random_matrix(num_layers * 2 * num_kv_heads, head_dim, dtype, seed)
            page[:, :, :, position % tokens_per_page] = values.view(num_layers, 2, num_kv_heads, head_dim)
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).to(torch.int32)
    batch = AttentionBatch(tables, starts, torch.tensor(totals, dtype=torch.int32))
    return Sequences(KvCache(pool, num_kv_heads, head_dim), batch, num_heads, tokens_per_page)
