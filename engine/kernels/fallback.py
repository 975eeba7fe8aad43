"""The kernels as torch operators, for machines without a C++ compiler.

Equal to the other backends within the tolerances in README.md, but several times slower. They copy the pages, and torch
chooses its algorithms by shape, so a token's last bits may depend on its batch.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.drawing import draw
from engine.kernels.layout import column_tiles, matrix_of, tile_bytes
from engine.kernels.reference import begin_step, embed, logit_stats, pack_linear, rms_norm, rotate
from engine.kernels.types import TILE_COLUMNS, TILE_RANKS, AttentionBatch, KvCache, LoraBatch, LoraTables, PackedLinear

__all__ = [
    "begin_step",
    "draw",
    "embed",
    "linear",
    "logit_stats",
    "lora_apply",
    "lora_linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
]


def linear(x: Tensor, weight: PackedLinear, out: Tensor) -> None:
    """See `Kernels.linear`."""
    out.copy_(_base(x, weight) if out.dtype == x.dtype else _base_f32(x, weight))


def lora_linear(x: Tensor, weight: PackedLinear, lora: LoraBatch, layer: int, projection: int, out: Tensor) -> None:
    """See `Kernels.lora_linear`: rows with an adapter are computed in float32 and rounded once."""
    out.copy_(_base(x, weight))
    rows = _adapted_rows(lora)
    if len(rows) > 0:
        y = _base_f32(x, weight)
        lora_apply(y, x, weight.out_features, lora, layer, projection)
        out[rows] = y[rows].to(out.dtype)


def _adapted_rows(lora: LoraBatch) -> Tensor:
    return torch.repeat_interleave(lora.segment_slots >= 0, lora.segments.diff()).nonzero().squeeze(1)


def lora_apply(y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int) -> None:
    """See `Kernels.lora_apply`: one pair of matrix products per segment and projection."""
    for (start, end), slot in zip(pairwise(lora.segments.tolist()), lora.segment_slots.tolist(), strict=True):
        if slot < 0 or end == start:
            continue
        for index, columns in enumerate(torch.split(y[start:end], list(out_features), dim=1)):
            _add_segment(columns, x[start:end], lora.tables, slot, layer, projection + index)


def _add_segment(y: Tensor, x: Tensor, tables: LoraTables, slot: int, layer: int, projection: int) -> None:
    first, rank = tables.parts[slot, layer, projection].tolist()
    if rank == 0:
        return
    groups = rank // TILE_RANKS
    num_a, num_b = (groups * column_tiles(n) for n in (x.shape[1], y.shape[1]))
    tiles = _gather_tiles(tables, slot, layer, x.dtype, first, num_a + num_b)
    a, b = matrix_of(tiles[:num_a], rank, x.shape[1]), matrix_of(tiles[num_a:], rank, y.shape[1])
    h = (x.float() @ a.float().T) * tables.scales[slot, layer, projection]
    y.copy_(y.float() + h @ b.float())


def _gather_tiles(tables: LoraTables, slot: int, layer: int, dtype: torch.dtype, first: int, count: int) -> Tensor:
    per_page = tables.pool.shape[2] // tile_bytes(dtype)
    tiles = torch.arange(first, first + count)
    pages = tables.adapter_pages[slot][tiles // per_page].long()
    stored = tables.pool[layer].view(dtype).view(-1, per_page, TILE_RANKS, TILE_COLUMNS)
    return stored[pages, tiles % per_page]


def _base(x: Tensor, weight: PackedLinear) -> Tensor:
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    return F.linear(x, weight.data, bias)


def _base_f32(x: Tensor, weight: PackedLinear) -> Tensor:
    return F.linear(x.float(), weight.data.float(), weight.bias)


def rope_write_kv(
    qkv: Tensor,
    kv: KvCache,
    layer: int,
    batch: AttentionBatch,
    num_heads: int,
    cos_sin: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `Kernels.rope_write_kv`."""
    pages = reference.kv_pages(kv, layer, qkv.dtype)
    sequences, positions = _places(batch)
    heads = qkv.view(len(qkv), -1, kv.head_dim)
    q, k, v = torch.split(heads, [num_heads, kv.num_kv_heads, kv.num_kv_heads], dim=1)
    for part, norm in ((q, q_norm), (k, k_norm)):
        if norm is not None:
            rms_norm(part, norm, eps, part)
        if cos_sin is not None:
            part.copy_(rotate(part.float(), cos_sin[positions][:, None]))
    page = batch.block_tables[sequences, positions // pages.shape[3]].long()
    slot = positions % pages.shape[3]
    pages[page, 0, :, slot] = k
    pages[page, 1, :, slot] = v


def paged_attention(
    q: Tensor,
    kv: KvCache,
    layer: int,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    out: Tensor,
    window: int = 0,
) -> None:
    """See `Kernels.paged_attention`: torch's attention, one sequence at a time, over a copy of its pages."""
    pages = reference.kv_pages(kv, layer, q.dtype)
    starts = batch.query_starts.tolist()
    for sequence, context in enumerate(batch.context_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        table = batch.block_tables[sequence, : -(-context // pages.shape[3])].long()
        keys, values = pages[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].unbind(0)
        heads = q[start:end, : num_heads * kv.head_dim].reshape(end - start, num_heads, kv.head_dim).transpose(0, 1)
        mask = _visible(context, end - start, window)
        attended = F.scaled_dot_product_attention(
            heads[None].float(), keys[None].float(), values[None].float(), mask, scale=scale, enable_gqa=True
        )
        out[start:end] = attended[0].transpose(0, 1).flatten(1)


def _visible(context: int, num_queries: int, window: int) -> Tensor:
    positions = torch.arange(context - num_queries, context)[:, None]
    keys = torch.arange(context)
    mask = keys <= positions
    return mask & (keys > positions - window) if window else mask


def _places(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every token, int64."""
    counts = batch.query_starts.diff().long()
    sequences = torch.repeat_interleave(torch.arange(len(counts)), counts)
    ends = batch.query_starts[1:].long()[sequences]
    return sequences, batch.context_lens.long()[sequences] - ends + torch.arange(len(sequences))


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `Kernels.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)
