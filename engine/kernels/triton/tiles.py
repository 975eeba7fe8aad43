"""Shared device code: reading tiles from pages, and products that keep the fp32 precision of their left operand."""

import triton
import triton.language as tl

# The interpreter stores bf16 as integers and multiplies them as such. Its products use NumPy, whose last bits, unlike a
# tensor core's, depend on a row's index in its block; fp64 rounds these differences away.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_tiles(
    pool,
    page_row,
    first,
    ranks,
    rank,
    column_tile,
    across,
    TILES: tl.constexpr,
    TILES_PER_PAGE: tl.constexpr,
):
    """[R, TILES * 64] of a matrix cut into tiles, starting at column tile `column_tile`; 0 past its ranks and columns.

    pool: one layer's pages; page_row: int32, logical page -> page id; first: the matrix's first tile; across: its
    column tiles. A tile is 8 ranks x 64 columns within one page, so one lookup serves 1 KiB (in 16 bits).
    """
    c = column_tile + tl.arange(0, TILES)
    tile = first + (ranks // 8)[:, None] * across + c[None, :]
    inside = (ranks < rank)[:, None] & (c < across)[None, :]
    page = tl.load(page_row + tile // TILES_PER_PAGE, mask=inside, other=0).to(tl.int64)
    row = (page * TILES_PER_PAGE + tile % TILES_PER_PAGE) * 512 + (ranks % 8)[:, None] * 64
    values = tl.load(pool + row[:, :, None] + tl.arange(0, 64)[None, None, :], mask=inside[:, :, None], other=0.0)
    return tl.reshape(values, [ranks.shape[0], TILES * 64])


@triton.jit
def dot_narrow(a, b, acc):
    """acc + a b for two operands of one dtype, in fp32; fp32 operands are not reduced to tf32."""
    if INTERPRETED:
        exact = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
        return acc + exact.to(tl.float32)
    else:  # noqa: RET505 - only the branch that is taken is compiled
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_exact(a, b, acc):
    """acc + a b with a in fp32 and b in any dtype: a is split into two numbers that tensor cores can multiply.

    bf16: a = high + low with an error of 2^-17 of a. fp16 lacks a's range, so its products use tf32, three per pair.
    """
    if b.dtype == tl.bfloat16:
        high = rounded(a, tl.bfloat16)
        low = rounded(a - high.to(tl.float32), tl.bfloat16)
        return dot_narrow(high, b, dot_narrow(low, b, acc))
    elif b.dtype == tl.float16:  # noqa: RET505 - only the branch that fits the dtype is compiled
        return tl.dot(a, b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_shares(a, b, acc):
    """acc + a b with a in fp32 and at most 1, so that its high and low parts fit in every dtype of b."""
    high = rounded(a, b.dtype)
    acc = dot_narrow(high, b, acc)
    if b.dtype != tl.float32:
        acc = dot_narrow(rounded(a - high.to(tl.float32), b.dtype), b, acc)
    return acc


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x rounded to another dtype, to nearest even. The interpreter itself would truncate to bf16."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
