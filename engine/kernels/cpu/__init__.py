"""The CPU backend: C++ operators, compiled at first use and called through torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cpu.build import load_library
from engine.kernels.drawing import draw
from engine.kernels.types import TILE_COLUMNS, AttentionBatch, KvCache, Limits, LoraBatch, PackedLinear


class CpuKernels:
    """`Kernels` as C++ operators. Raises KernelBuildError if they cannot be compiled here.

    A token's result never depends on the other tokens of a call: every output is one reduction in a fixed order.
    """

    def __init__(self, flags: Sequence[str] | None = None) -> None:
        self._ops = ops = load_library(flags)
        self._linear = ops.linear.default
        self._lora_linear = ops.lora_linear.default
        self._lora_apply = ops.lora_apply.default
        self._packed_rows = ops.packed_rows.default
        self._rms_norm = ops.rms_norm.default
        self._rope_write_kv = ops.rope_write_kv.default
        self._paged_attention = ops.paged_attention.default
        self._silu_mul = ops.silu_mul.default
        self._logit_stats = ops.logit_stats.default

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> PackedLinear:
        """See `Kernels.pack_linear`: blocks of 64 output columns, each a run of 32-bit words over K."""
        dtype, in_features = weights[0].dtype, weights[0].shape[1]
        words = -(-in_features * dtype.itemsize // 4)
        blocks = [-(-len(w) // TILE_COLUMNS) for w in weights]
        data = torch.empty(sum(blocks) * words * TILE_COLUMNS, dtype=torch.int32)
        for weight, part in zip(weights, torch.split(data, [n * words * TILE_COLUMNS for n in blocks]), strict=True):
            self._ops.pack.default(weight.contiguous(), part)
        bias = _packed_bias(biases, blocks, dtype) if any(b is not None for b in biases) else None
        return PackedLinear(data, bias, in_features, tuple(len(w) for w in weights), dtype)

    def begin_step(self) -> None:
        """See `Kernels.begin_step`: there is no cached state."""

    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See `Kernels.linear`."""
        self._linear(x, weight.data, weight.bias, weight.out_features, out)

    def lora_linear(
        self, x: Tensor, weight: PackedLinear, lora: LoraBatch, layer: int, projection: int, out: Tensor
    ) -> None:
        """See `Kernels.lora_linear`: the adapters' share is added to the float32 accumulators."""
        self._lora_linear(
            x, weight.data, weight.bias, weight.out_features, *_lora_arguments(lora), layer, projection, out
        )

    def lora_apply(
        self, y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int
    ) -> None:
        """See `Kernels.lora_apply`."""
        self._lora_apply(y, x, out_features, *_lora_arguments(lora), layer, projection)

    def embed(self, ids: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See `Kernels.embed`: gathers from the packed weight, so that tied embeddings exist once."""
        self._packed_rows(ids, weight.data, weight.out_features[0], out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
        """See `Kernels.rms_norm`."""
        self._rms_norm(x, residual, weight, eps, out)

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
        """See `Kernels.rope_write_kv`."""
        self._rope_write_kv(
            qkv, kv.pool, *_attention_arguments(kv, layer, batch, num_heads), cos_sin, q_norm, k_norm, eps
        )

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
        """See `Kernels.paged_attention`."""
        self._paged_attention(q, kv.pool, *_attention_arguments(kv, layer, batch, num_heads), scale, window, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Kernels.silu_mul`."""
        self._silu_mul(gate_up, out)

    def logit_stats(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.logit_stats`."""
        argmax = torch.empty(len(logits), dtype=torch.int64)
        logsumexp = torch.empty(len(logits), dtype=torch.float32)
        self._logit_stats(logits, argmax, logsumexp)
        return argmax, logsumexp

    def draw(self, logits: Tensor, limits: Limits) -> Tensor:
        """See `Kernels.draw`."""
        return draw(logits, limits)

    def probes(self) -> Any:
        """The namespace with `read_probe` and `multiply_probe`, with which the benchmark measures the machine."""
        return self._ops

    def poison_scratch(self, num_values: int) -> None:
        """Fill this thread's scratch with NaN, so that tests detect a value that is read before it is written."""
        self._ops.poison_scratch(num_values)


def _lora_arguments(lora: LoraBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = lora.tables
    return tables.pool, tables.adapter_pages, tables.parts, tables.scales, lora.segments, lora.segment_slots


def _attention_arguments(
    kv: KvCache, layer: int, batch: AttentionBatch, num_heads: int
) -> tuple[int, Tensor, Tensor, Tensor, int, int, int]:
    return (
        layer,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        num_heads,
        kv.num_kv_heads,
        kv.head_dim,
    )


def _packed_bias(biases: Sequence[Tensor | None], blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Biases as float32 in the order of the accumulators, each projection padded to whole blocks."""
    order = _column_order(dtype)
    padded = torch.zeros(sum(blocks), TILE_COLUMNS)
    for bias, rows in zip(biases, torch.split(padded, list(blocks)), strict=True):
        if bias is not None:
            rows.view(-1)[: len(bias)] = bias.float()
    return padded[:, order].contiguous()


def _column_order(dtype: torch.dtype) -> Tensor:
    """The column of each accumulator: bf16 separates the even and the odd columns of every 32."""
    columns = torch.arange(TILE_COLUMNS)
    return columns.view(2, 16, 2).transpose(1, 2).flatten() if dtype == torch.bfloat16 else columns
