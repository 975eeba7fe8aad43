"""The base product with one tiling for every number of rows, so that a row's result does not depend on the others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, Runner
from engine.kernels.triton.table import LINEAR, Architecture, rows
from engine.kernels.triton.tiles import dot_narrow, rounded
from engine.kernels.types import PackedLinear


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    out_features,
    in_features,
    x_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, n] = sum over k of x[t, k] W[n, k] + b[n], in fp32 over blocks of k in order, rounded once.

    x: [T, K]; weight: [N, K]; bias: [N] or none; out: [T, N] of x's dtype or fp32. Grid: (blocks of N, blocks of T).
    K is never split, and a block of rows has the same size for any T: missing rows are zeros.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    live = m < num_rows
    known = n < out_features
    x_cells = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_cells = weight + n.to(tl.int64)[:, None] * in_features + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, in_features, BLOCK_K):
        inside = k < in_features - first
        a = tl.load(x_cells + first, mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_cells + first, mask=known[:, None] & inside[None, :], other=0.0)
        acc = dot_narrow(a, tl.trans(w), acc)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
    cells = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(cells, rounded(acc, out.dtype.element_ty), mask=live[:, None] & known[None, :])


class Linear:
    """Launches the base product."""

    def __init__(self, run: Runner, architecture: Architecture) -> None:
        self._run, self._architecture = run, architecture

    def apply(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See `Kernels.linear`."""
        num_rows, size = out.shape
        assert x.stride(1) == out.stride(1) == 1
        assert weight.data.is_contiguous()
        assert out.dtype in (x.dtype, torch.float32)
        blocks = LINEAR[self._architecture]
        block_m = rows(blocks.block_m, x.dtype.itemsize)
        block_n = rows(blocks.block_n, x.dtype.itemsize)
        arguments = (
            *(x, weight.data, weight.bias, out, num_rows, size, weight.in_features),
            *(x.stride(0), out.stride(0)),
        )
        constants = {
            "HAS_BIAS": weight.bias is not None,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": blocks.block_k,
        }
        grid = (triton.cdiv(size, block_n), triton.cdiv(num_rows, block_m))
        self._run(Launch(linear, grid, arguments, constants, blocks.num_warps, blocks.num_stages))
