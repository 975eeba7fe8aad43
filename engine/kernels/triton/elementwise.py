"""Norms, the gated activation, embedding rows and logit statistics: everything that is bound by memory bandwidth."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import THREADS_PER_WARP, Launch, Runner, check_in_place
from engine.kernels.triton.table import ROWS
from engine.kernels.triton.tiles import rounded

MAX_NORM_WIDTH = 32768


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += x if given, then out = v / sqrt(mean(v^2) + eps) w with v = residual, else x.

    x, residual, out: [T, width]; weight: [width]. Grid: (T), a program per row, BLOCK columns at once. In fp32; the
    sum is rounded to the residual's dtype before the norm, as it is stored in that dtype.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    v = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        cells = residual + row * residual_stride + n
        kept = rounded(tl.load(cells, mask=inside, other=0.0).to(tl.float32) + v, residual.dtype.element_ty)
        tl.store(cells, kept, mask=inside)
        v = kept.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(v * v, axis=0) / width + eps)
    y = v * factor * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, gate_up_stride, out_stride, width, BLOCK: tl.constexpr):
    """out = gate / (1 + e^-gate) * up with gate_up = [T, 2 width], gate first. Grid: (T, column blocks). In fp32."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    cells = gate_up + row * gate_up_stride + n
    gate = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(cells + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + n, rounded(y, out.dtype.element_ty), mask=inside)


@triton.jit
def embed(ids, weight, out, weight_stride, out_stride, width, BLOCK: tl.constexpr):
    """out[t] = weight[ids[t]]. ids: int64 [T]; weight: [V, width]. Grid: (T, column blocks). An exact copy."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    values = tl.load(weight + tl.load(ids + row) * weight_stride + n, mask=inside)
    tl.store(out + row * out_stride + n, values, mask=inside)


@triton.jit
def logit_stats(logits, argmax, logsumexp, logits_stride, size, BLOCK: tl.constexpr):
    """argmax = lowest index of the largest logit; logsumexp = log of the sum of e^logit. logits: fp32 [B, size].

    Grid: (B), a program per row, BLOCK columns at a time in order, with a running maximum and sum. For a row of only
    -inf the results are 0 and -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    where = tl.full([], 0, dtype=tl.int32)
    total = tl.full([], 0.0, dtype=tl.float32)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * logits_stride + n, mask=n < size, other=float("-inf"))
        top, at = tl.max(values, axis=0, return_indices=True)
        where = tl.where(top > largest, first + at, where)
        now = tl.maximum(largest, top)
        base = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), axis=0)
        largest = now
    tl.store(argmax + row, where.to(tl.int64))
    logarithm = tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(logsumexp + row, largest + logarithm)


class Elementwise:
    """Launches the kernels of this module."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None) -> None:
        """See `Kernels.rms_norm`."""
        num_rows, width = x.shape
        assert width <= MAX_NORM_WIDTH
        assert out.shape == x.shape
        assert x.stride(1) == out.stride(1) == weight.stride(0) == 1
        assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
        residual_stride = 0 if residual is None else residual.stride(0)
        arguments = (x, residual, weight, out, x.stride(0), residual_stride, out.stride(0), width, eps)
        block = max(triton.next_power_of_2(width), THREADS_PER_WARP)
        num_warps = min(ROWS["rms_norm"].num_warps, block // THREADS_PER_WARP)
        check_in_place(block, num_warps)
        constants = {"HAS_RESIDUAL": residual is not None, "BLOCK": block}
        self._run(Launch(rms_norm, (num_rows,), arguments, constants, num_warps, 1))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Kernels.silu_mul`."""
        num_rows, width = out.shape
        assert gate_up.shape == (num_rows, 2 * width)
        assert gate_up.stride(1) == out.stride(1) == 1
        blocks = ROWS["silu_mul"]
        arguments = (gate_up, out, gate_up.stride(0), out.stride(0), width)
        grid = (num_rows, triton.cdiv(width, blocks.block))
        self._run(Launch(silu_mul, grid, arguments, {"BLOCK": blocks.block}, blocks.num_warps, 1))

    def embed(self, ids: Tensor, weight: Tensor, out: Tensor) -> None:
        """Rows of a [V, K] weight; the caller must reject ids outside the vocabulary."""
        num_rows, width = out.shape
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        assert ids.shape == (num_rows,)
        assert weight.dtype == out.dtype
        assert weight.shape[1] == width
        assert weight.stride(1) == out.stride(1) == 1
        blocks = ROWS["embed"]
        grid = (num_rows, triton.cdiv(width, blocks.block))
        arguments = (ids, weight, out, weight.stride(0), out.stride(0), width)
        self._run(Launch(embed, grid, arguments, {"BLOCK": blocks.block}, blocks.num_warps, 1))

    def logit_stats(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.logit_stats`."""
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        argmax = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logsumexp = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        blocks = ROWS["logit_stats"]
        arguments = (logits, argmax, logsumexp, logits.stride(0), logits.shape[1])
        self._run(Launch(logit_stats, (len(logits),), arguments, {"BLOCK": blocks.block}, blocks.num_warps, 2))
        return argmax, logsumexp
