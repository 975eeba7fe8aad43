"""The kernels as equations: float32, one row at a time, slow. Every other backend is tested against this one.

Inputs are read in their own dtype and every intermediate is float32; pass a float32 `out` to get the unrounded result.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.layout import column_tiles, matrix_of, tile_bytes
from engine.kernels.types import TILE_COLUMNS, TILE_RANKS, AttentionBatch, KvCache, LoraBatch, LoraTables, PackedLinear


def pack_linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> PackedLinear:
    """See `Kernels.pack_linear`: only concatenates."""
    given = list(biases) or [None] * len(weights)
    bias = None
    if any(b is not None for b in given):
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, given, strict=True)]
        bias = torch.cat(filled).float()
    sizes = tuple(len(w) for w in weights)
    return PackedLinear(torch.cat(list(weights)), bias, weights[0].shape[1], sizes, weights[0].dtype)


def begin_step() -> None:
    """See `Kernels.begin_step`: there is no cached state."""


def linear(x: Tensor, weight: PackedLinear, out: Tensor) -> None:
    """y = x W^T + b."""
    out.copy_(_base(x, weight))


def lora_linear(x: Tensor, weight: PackedLinear, lora: LoraBatch, layer: int, projection: int, out: Tensor) -> None:
    """y = x W^T + b + s (x A^T) B."""
    y = _base(x, weight)
    lora_apply(y, x, weight.out_features, lora, layer, projection)
    out.copy_(y)


def lora_apply(y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int) -> None:
    """y += s (x A^T) B for each segment and projection; rows of slot -1 are not changed."""
    for (start, end), slot in zip(pairwise(lora.segments.tolist()), lora.segment_slots.tolist(), strict=True):
        column = 0
        for index, size in enumerate(out_features):
            weights = adapter_matrices(lora.tables, slot, layer, projection + index, x.shape[1], size, x.dtype)
            if weights is not None and end > start:
                a, b, scale = weights
                h = scale * (x[start:end].float() @ a.float().T)
                block = y[start:end, column : column + size]
                block.copy_(block.float() + h @ b.float())
            column += size


def adapter_matrices(
    tables: LoraTables, slot: int, layer: int, projection: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float] | None:
    """(A [R, K], B transposed [R, N], scale) read from the pages; None if the adapter lacks the projection."""
    if slot < 0:
        return None
    first, rank = tables.parts[slot, layer, projection].tolist()
    if rank == 0:
        return None
    num_a, num_b = (rank // TILE_RANKS * column_tiles(n) for n in (in_features, out_features))
    tiles = _tiles(tables, slot, layer, dtype, first, num_a + num_b)
    a, b = matrix_of(tiles[:num_a], rank, in_features), matrix_of(tiles[num_a:], rank, out_features)
    return a, b, float(tables.scales[slot, layer, projection])


def _tiles(tables: LoraTables, slot: int, layer: int, dtype: torch.dtype, first: int, count: int) -> Tensor:
    size = tile_bytes(dtype)
    per_page = tables.pool.shape[2] // size
    tiles = []
    for tile in range(first, first + count):
        page = int(tables.adapter_pages[slot, tile // per_page])
        offset = tile % per_page * size
        tiles.append(tables.pool[layer, page, offset : offset + size].view(dtype))
    return torch.stack(tiles).view(-1, TILE_RANKS, TILE_COLUMNS)


def _base(x: Tensor, weight: PackedLinear) -> Tensor:
    y = x.float() @ weight.data.float().T
    return y if weight.bias is None else y + weight.bias


def embed(ids: Tensor, weight: PackedLinear, out: Tensor) -> None:
    """y[i] = W[ids[i]]."""
    out.copy_(weight.data[ids])


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
    """y = v / sqrt(mean(v^2) + eps) * weight, where v is x, or residual + x, which is stored in the residual."""
    if residual is not None:
        residual.copy_(residual.float() + x.float())
    out.copy_(_rms_norm(x if residual is None else residual, weight, eps))


def _rms_norm(v: Tensor, weight: Tensor, eps: float) -> Tensor:
    v = v.float()
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.float()


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
    """Norm and rotate q and k, then write k and v to the page and slot of their position."""
    pages = kv_pages(kv, layer, qkv.dtype)
    for sequence, token, position in tokens_of(batch):
        heads = qkv[token].view(-1, kv.head_dim)
        q, k, v = torch.split(heads, [num_heads, kv.num_kv_heads, kv.num_kv_heads])
        for part, norm in ((q, q_norm), (k, k_norm)):
            if norm is not None:
                part.copy_(_rms_norm(part, norm, eps))
            if cos_sin is not None:
                part.copy_(rotate(part.float(), cos_sin[position]))
        page, slot = place(batch, sequence, position, pages.shape[3])
        pages[page, 0, :, slot] = k
        pages[page, 1, :, slot] = v


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + rotary_dim / 2); columns past rotary_dim pass through."""
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    a, b, rest = torch.split(x, [rotary // 2, rotary // 2, x.shape[-1] - rotary], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


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
    """y = softmax(scale q K^T) V over the positions visible to each token."""
    pages = kv_pages(kv, layer, q.dtype)
    group = num_heads // kv.num_kv_heads
    for sequence, token, position in tokens_of(batch):
        first = max(position - window + 1, 0) if window else 0
        places = [place(batch, sequence, p, pages.shape[3]) for p in range(first, position + 1)]
        keys = torch.stack([pages[page, 0, :, slot] for page, slot in places], dim=1).float()
        values = torch.stack([pages[page, 1, :, slot] for page, slot in places], dim=1).float()
        heads = q[token, : num_heads * kv.head_dim].view(kv.num_kv_heads, group, kv.head_dim).float()
        weights = torch.softmax(scale * heads @ keys.transpose(1, 2), dim=-1)
        out[token] = (weights @ values).reshape(-1)


def kv_pages(kv: KvCache, layer: int, dtype: torch.dtype) -> Tensor:
    """One layer of the pool as [P, 2, kv_heads, tokens_per_page, head_dim], a view."""
    values = kv.pool[layer].view(dtype)
    tokens_per_page = values.shape[1] // (2 * kv.num_kv_heads * kv.head_dim)
    used = values[:, : 2 * kv.num_kv_heads * tokens_per_page * kv.head_dim]
    return used.view(len(used), 2, kv.num_kv_heads, tokens_per_page, kv.head_dim)


def tokens_of(batch: AttentionBatch) -> Iterator[tuple[int, int, int]]:
    """(sequence, token of the step, position in the sequence) for every token."""
    starts = batch.query_starts.tolist()
    for sequence, context in enumerate(batch.context_lens.tolist()):
        for token in range(starts[sequence], starts[sequence + 1]):
            yield sequence, token, context - starts[sequence + 1] + token


def place(batch: AttentionBatch, sequence: int, position: int, tokens_per_page: int) -> tuple[int, int]:
    """(page id, slot in the page) of a position."""
    return int(batch.block_tables[sequence, position // tokens_per_page]), position % tokens_per_page


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """y = gate / (1 + e^-gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(gate / (1 + torch.exp(-gate)) * up)


def logit_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(argmax, log sum e^logit) of each row."""
    return logits.argmax(dim=-1), torch.logsumexp(logits, dim=-1)
