"""The kernels' arguments, plain tensors with names, and the operators that every backend implements.

Letters: L layers, P pages, T tokens of the step, B sequences, S segments, K inputs, N outputs, R ranks, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, dtype

TILE_RANKS = 8
TILE_COLUMNS = 64
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class PackedLinear:
    """A group of projections over one input, packed once by a backend for its own use.

    `data` and `bias` are in the backend's layout; only that backend may read them.
    """

    data: Tensor
    bias: Tensor | None
    in_features: int
    out_features: tuple[int, ...]
    dtype: dtype


@dataclass(frozen=True)
class LoraTables:
    """Every adapter in the pool, by slot. Rank 0 in `parts` = the adapter lacks that projection.

    pool: uint8 [L, P, page_bytes]; adapter_pages: int32 [slots, max_pages], logical page -> page id;
    parts: int32 [slots, L, 7, 2] = (first tile, padded rank); scales: float32 [slots, L, 7]. `rank_bound`: upper
    bound of the padded ranks; None if unknown.
    """

    pool: Tensor
    adapter_pages: Tensor
    parts: Tensor
    scales: Tensor
    rank_bound: int | None = None


@dataclass(frozen=True)
class LoraBatch:
    """One step's tokens by adapter. segments: int32 [S + 1] token ranges; segment_slots: int32 [S], -1 = base only."""

    tables: LoraTables
    segments: Tensor
    segment_slots: Tensor


@dataclass(frozen=True)
class KvCache:
    """The pool as KV: a page of one layer is [2 (k, v), kv_heads, tokens_per_page, head_dim]."""

    pool: Tensor
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionBatch:
    """One step's tokens by sequence; the query tokens of a sequence are its last ones.

    block_tables: int32 [B, max_blocks]; query_starts: int32 [B + 1], the step's tokens of each sequence;
    context_lens: int32 [B], tokens in KV after this step's are written.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor


@dataclass(frozen=True)
class Limits:
    """Sampling parameters per row of logits, float64 [B] each; `restricted`: int64 [R], the rows with top_k and top_p.

    top_k: int64 [R], top_p: float64 [R]; uniform: the row's random number in [0, 1).
    """

    temperature: Tensor
    min_p: Tensor
    uniform: Tensor
    restricted: Tensor
    top_k: Tensor
    top_p: Tensor


class Kernels(Protocol):
    """The operators of one backend. Outputs are the caller's buffers; no state is kept between steps."""

    def begin_step(self) -> None:
        """Drop everything derived from the last step's metadata, since its tensors may be reused with new contents."""

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> PackedLinear:
        """Pack one to three [N_i, K] weights (and optional [N_i] biases) of one dtype for `linear`."""

    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """out[T, sum N_i] = x[T, K] W^T + b. `out` has x's dtype, or float32 for the unrounded accumulators."""

    def lora_linear(
        self, x: Tensor, weight: PackedLinear, lora: LoraBatch, layer: int, projection: int, out: Tensor
    ) -> None:
        """out = x W^T + b + s (x A^T) B, rounded once; `projection` is the group's first, an index of PROJECTIONS."""

    def lora_apply(
        self, y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int
    ) -> None:
        """y += s (x A^T) B in place; rows without an adapter are not touched. `y` has x's dtype or float32."""

    def embed(self, ids: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """out[i] = row ids[i] of a packed [V, K] weight of one projection; ids are int64."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
        """residual += x if given, then out = v / sqrt(mean(v^2) + eps) * weight with v = residual, else x."""

    def rope_write_kv(
        self,
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
        """Norm (if given) and rotate q and k of qkv[T, (heads + 2 kv_heads) D] in place, then write k, v to the pages.

        cos_sin: float32 [max_positions, rotary_dim], cosines then sines of half-split rope; None = no rotation.
        """

    def paged_attention(
        self,
        q: Tensor,
        kv: KvCache,
        layer: int,
        batch: AttentionBatch,
        num_heads: int,
        scale: float,
        out: Tensor,
        window: int = 0,
    ) -> None:
        """Causal attention of the step's tokens over the pages; `q` is [T, >= heads * D], the first columns are read.

        window: a token attends to the last `window` positions including its own; 0 = all.
        """

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out[T, I] = silu(gate) * up with gate_up = [T, 2 I], gate first."""

    def logit_stats(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(int64 [B] lowest index of the largest, float32 [B] log-sum-exp) of float32 logits [B, V]."""

    def draw(self, logits: Tensor, limits: Limits) -> Tensor:
        """int64 [B] tokens drawn from softmax(logits / temperature), float32 [B, V], restricted as follows.

        Restricted rows keep the top_k most likely tokens, and of these the fewest whose share reaches top_p; all rows
        keep only tokens with at least min_p times the share of the most likely one.
        """
