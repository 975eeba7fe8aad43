"""The CUDA backend: Triton kernels over the pool's pages, and torch's matrix product for the base weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.triton.attention import Attention
from engine.kernels.triton.drawing import Drawing
from engine.kernels.triton.elementwise import Elementwise
from engine.kernels.triton.launch import Runner, Scratch, device_architecture, run
from engine.kernels.triton.linear import Linear
from engine.kernels.triton.lora import Lora
from engine.kernels.triton.plan import Plans
from engine.kernels.triton.rope import Rope
from engine.kernels.triton.second_stream import SideStream
from engine.kernels.triton.table import row_architecture
from engine.kernels.types import AttentionBatch, KvCache, Limits, LoraBatch, PackedLinear


class TritonKernels:
    """`Kernels` on a CUDA device. Results repeat bit for bit: no atomics, every reduction in a fixed order.

    The base product is torch's (cuBLAS), which picks its algorithm by shape, so a token's last bits may depend on the
    number of rows in its batch. `lora_linear` adds to that product in place: rows without an adapter keep its bits, and
    rows with one are rounded a second time unless `out` is float32.

    With `batch_invariant`, the base product is a kernel of this package, and every kernel has one set of blocks for all
    steps: a token's result then depends only on the token, its adapter, and its keys and values.

    With `second_stream`, the adapters' shrink runs there in parallel with the base product; no bits change.
    """

    def __init__(
        self,
        runner: Runner = run,
        capability: int | None = None,
        *,
        batch_invariant: bool = False,
        second_stream: SideStream | None = None,
    ) -> None:
        accumulate_in_float32()
        self._second_stream = second_stream
        architecture = row_architecture(device_architecture() if capability is None else capability)
        self.scratch = Scratch()
        self._plans = plans = Plans(runner)
        self._lora = Lora(runner, architecture, self.scratch, invariant=batch_invariant)
        self._attention = Attention(runner, architecture, self.scratch, plans, invariant=batch_invariant)
        self._rope = Rope(runner, plans)
        self._elementwise = Elementwise(runner)
        self._drawing = Drawing(runner)
        self._linear = Linear(runner, architecture) if batch_invariant else None

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> PackedLinear:
        """See `Kernels.pack_linear`: one [sum N_i, K] weight in torch's layout; a single weight is not copied."""
        assert len({weight.dtype for weight in weights}) == 1
        data = weights[0].contiguous() if len(weights) == 1 else torch.cat(list(weights))
        bias = None
        if any(b is not None for b in biases):
            filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            bias = torch.cat(filled)
        return PackedLinear(data, bias, data.shape[1], tuple(len(w) for w in weights), data.dtype)

    def begin_step(self) -> None:
        """See `Kernels.begin_step`: work lists are rebuilt."""
        self._plans.forget()
        self._lora.begin_step()

    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See `Kernels.linear`."""
        assert x.dtype == weight.dtype
        assert x.shape[1] == weight.in_features
        assert out.shape == (len(x), sum(weight.out_features))
        if len(x) == 0:
            return
        if self._linear is not None:
            self._linear.apply(x, weight, out)
        elif out.dtype != x.dtype:
            _product_in_float32(x, weight, out)
        elif weight.bias is None:
            torch.mm(x, weight.data.T, out=out)
        else:
            torch.addmm(weight.bias, x, weight.data.T, out=out)

    def lora_linear(
        self, x: Tensor, weight: PackedLinear, lora: LoraBatch, layer: int, projection: int, out: Tensor
    ) -> None:
        """See `Kernels.lora_linear`: the base product, then `lora_apply` to it."""
        product = self._lora.product(out, x, weight.out_features, lora, layer, projection)
        if product is None:
            self.linear(x, weight, out)
        elif self._second_stream is not None and self._second_stream.is_open():
            with self._second_stream.fork():
                self._lora.shrink(product)
            self.linear(x, weight, out)
            self._second_stream.join()
            self._lora.expand(product)
        else:
            self.linear(x, weight, out)
            self._lora.shrink(product)
            self._lora.expand(product)

    def lora_apply(
        self, y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int
    ) -> None:
        """See `Kernels.lora_apply`: one shrink and one expand for any mix of adapters and ranks."""
        product = self._lora.product(y, x, out_features, lora, layer, projection)
        if product is not None:
            self._lora.shrink(product)
            self._lora.expand(product)

    def embed(self, ids: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See `Kernels.embed`."""
        self._elementwise.embed(ids, weight.data, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
        """See `Kernels.rms_norm`."""
        self._elementwise.rms_norm(x, weight, eps, out, residual)

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
        self._rope.apply(qkv, kv, layer, batch, num_heads, cos_sin, q_norm, k_norm, eps)

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
        """See `Kernels.paged_attention`: decode splits the context into parts of a fixed length, prefill does not."""
        self._attention.apply(q, kv, layer, batch, num_heads, scale, out, window)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Kernels.silu_mul`."""
        self._elementwise.silu_mul(gate_up, out)

    def logit_stats(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.logit_stats`."""
        return self._elementwise.logit_stats(logits)

    def draw(self, logits: Tensor, limits: Limits) -> Tensor:
        """See `Kernels.draw`."""
        return self._drawing.draw(logits, limits)


def accumulate_in_float32() -> None:
    """Make torch's products precise enough for the tolerances: no tf32 instead of float32, no partial sums in 16 bits.

    By default torch allows cuBLAS to add the parts of a split K in 16 bits. The settings apply to the whole process.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _product_in_float32(x: Tensor, weight: PackedLinear, out: Tensor) -> None:
    """The unrounded accumulators; only CUDA's product of two 16-bit matrices can return them directly."""
    if x.is_cuda:
        torch.mm(x, weight.data.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weight.data.float().T, out=out)
    if weight.bias is not None:
        out += weight.bias
