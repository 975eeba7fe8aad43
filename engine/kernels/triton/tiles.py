"""What device code shares: reading tiles from pages, and a product that keeps its left side's fp32."""

import triton
import triton.language as tl

# The interpreter multiplies bf16 as the integers that it keeps them in. It leaves products to NumPy, whose last bits
# depend on where in a block a row stands, unlike a tensor core's; in fp64 they are rounded away.
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
    """[R, TILES * 64] of a matrix cut into tiles, columns from tile `column_tile` on; 0 past its ranks and columns.

    pool: one layer's pages; page_row: int32, logical page -> page id; first: the matrix's first tile; across: its
    column tiles. A tile is 8 ranks x 64 columns and lies in one page, so a lookup serves 1 KiB (in 16 bits).
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
    """acc + a b of two operands of one dtype, in fp32; fp32 operands are not cut down to tf32."""
    if INTERPRETED:
        exact = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
        return acc + exact.to(tl.float32)
    else:  # noqa: RET505 - device code is compiled from the branch that is taken
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_exact(a, b, acc):
    """acc + a b with a in fp32 and b in any dtype: a is taken as the sum of two numbers that tensor cores can multiply.

    bf16: a = high + low leaves 2^-17 of a. fp16 cannot hold a's range, so its products are in tf32, three per pair.
    """
    if b.dtype == tl.bfloat16:
        high = rounded(a, tl.bfloat16)
        low = rounded(a - high.to(tl.float32), tl.bfloat16)
        return dot_narrow(high, b, dot_narrow(low, b, acc))
    elif b.dtype == tl.float16:  # noqa: RET505 - device code takes the branch that its dtype fits
        return tl.dot(a, b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_shares(a, b, acc):
    """acc + a b with a in fp32 and at most 1, so that every dtype of b holds its high and its low part."""
    high = rounded(a, b.dtype)
    acc = dot_narrow(high, b, acc)
    if b.dtype != tl.float32:
        acc = dot_narrow(rounded(a - high.to(tl.float32), b.dtype), b, acc)
    return acc


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x in another dtype, to the nearest, ties to even. The interpreter alone would cut bf16 off."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
