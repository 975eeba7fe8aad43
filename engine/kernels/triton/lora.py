"""Shrink and expand: the adapters' part of a fused projection, read from the pool's pages, in two launches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.layout import column_tiles, tile_bytes
from engine.kernels.triton.launch import Launch, Runner, Scratch, check_in_place, version
from engine.kernels.triton.plan import Plans, WorkList
from engine.kernels.triton.table import EXPAND, SHRINK, Architecture, Phase, ShrinkBlocks, phase, rows, width
from engine.kernels.triton.tiles import dot_exact, dot_narrow, load_tiles, rounded
from engine.kernels.types import TILE_COLUMNS, LoraBatch

MAX_PROJECTIONS = 3
RANK_STEP = 16
TABLES_KEPT = 8  # a step alternates between the tables of the layers and those of embedding and head


@triton.jit(do_not_specialize=["pages_stride", "parts_stride", "parts_row"])
def shrink(
    x,
    pool,
    pages,
    parts,
    items,
    h,
    x_stride,
    in_features,
    pages_stride,
    parts_stride,
    parts_row,
    rank_bound,
    NUM_PROJECTIONS: tl.constexpr,
    TILES_PER_PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LANES: tl.constexpr,
):
    """h[t, c, p, r] = sum of x[t, k] A_p[r, k] over part c of K, for each projection p that the row's adapter has.

    x: [T, K]; A: [R, K] in tiles in `pool`, one layer's pages; h: fp32 [T, SPLIT_K, NUM_PROJECTIONS, rank_bound].
    Grid: (items, SPLIT_K, NUM_PROJECTIONS * LANES). An item is up to BLOCK_M rows of one adapter; a lane computes every
    LANES-th block of its ranks. Accumulated in fp32 over k in order. Rows without an item and ranks past the
    adapter's rank are not written: rank 0 and empty segments cost an early exit.
    """
    item = items + tl.program_id(0) * 4
    split = tl.program_id(1)
    projection = tl.program_id(2) // LANES
    lane = tl.program_id(2) % LANES
    slot = tl.load(item).to(tl.int64)
    if slot < 0:
        return
    part = parts + slot * parts_stride + (parts_row + projection) * 2
    first = tl.load(part)
    rank = tl.load(part + 1)
    tokens = tl.load(item + 1) + tl.arange(0, BLOCK_M)
    live = tokens < tl.load(item + 2)
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    h_rows = h + ((tokens.to(tl.int64) * SPLIT_K + split) * NUM_PROJECTIONS + projection)[:, None] * rank_bound
    page_row = pages + slot * pages_stride
    across = tl.cdiv(in_features, 64)
    per_split = tl.cdiv(tl.cdiv(across, TILES_K), SPLIT_K) * TILES_K
    begin = split * per_split
    for r in range(lane * BLOCK_R, rank, LANES * BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for tile in range(begin, tl.minimum(begin + per_split, across), TILES_K):
            a = load_tiles(pool, page_row, first, ranks, rank, tile, across, TILES_K, TILES_PER_PAGE)
            k = tile * 64 + tl.arange(0, TILES_K * 64)
            x_tile = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < in_features)[None, :], other=0.0)
            acc = dot_narrow(x_tile, tl.trans(a), acc)
        tl.store(h_rows + ranks[None, :], acc, mask=live[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["pages_stride", "parts_stride", "parts_row"])
def expand(
    y,
    h,
    pool,
    pages,
    parts,
    scales,
    items,
    y_stride,
    in_features,
    n0,
    n1,
    n2,
    pages_stride,
    parts_stride,
    parts_row,
    rank_bound,
    NUM_PROJECTIONS: tl.constexpr,
    TILES_PER_PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """y[t, n] += s_p * sum over r of (h[t, 0, p, r] + h[t, 1, p, r] + ...) B_p[r, n], rounded once to y's dtype.

    y: [T, n0 + n1 + n2], the projections side by side; B: [R, N] in tiles after A's; h: the output of `shrink`.
    Grid: (items, column blocks of all projections). The parts of K are added in order, the products in fp32 over r in
    order, so results repeat bit for bit. If the adapter lacks the projection, nothing is read or written.
    """
    item = items + tl.program_id(0) * 4
    block = tl.program_id(1)
    BLOCK_N: tl.constexpr = TILES_N * 64
    slot = tl.load(item).to(tl.int64)
    if slot < 0:
        return
    projection = 0
    size = n0
    column = 0
    if NUM_PROJECTIONS > 1:
        if block >= tl.cdiv(n0, BLOCK_N):
            block -= tl.cdiv(n0, BLOCK_N)
            projection = 1
            size = n1
            column = n0
            if NUM_PROJECTIONS > 2:
                if block >= tl.cdiv(n1, BLOCK_N):
                    block -= tl.cdiv(n1, BLOCK_N)
                    projection = 2
                    size = n2
                    column = n0 + n1
    part = parts + slot * parts_stride + (parts_row + projection) * 2
    rank = tl.load(part + 1)
    if rank == 0:
        return
    first = tl.load(part) + rank // 8 * tl.cdiv(in_features, 64)
    tokens = tl.load(item + 1) + tl.arange(0, BLOCK_M)
    live = tokens < tl.load(item + 2)
    h_rows = h + (tokens.to(tl.int64) * (SPLIT_K * NUM_PROJECTIONS) + projection)[:, None] * rank_bound
    page_row = pages + slot * pages_stride
    across = tl.cdiv(size, 64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for r in range(0, rank, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        b = load_tiles(pool, page_row, first, ranks, rank, block * TILES_N, across, TILES_N, TILES_PER_PAGE)
        written = live[:, None] & (ranks < rank)[None, :]
        shrunk = tl.load(h_rows + ranks[None, :], mask=written, other=0.0)
        for split in tl.static_range(1, SPLIT_K):
            part_of_k = h_rows + split * NUM_PROJECTIONS * rank_bound + ranks[None, :]
            shrunk += tl.load(part_of_k, mask=written, other=0.0)
        acc = dot_exact(shrunk, b, acc)
    scale = tl.load(scales + slot * (parts_stride // 2) + parts_row + projection)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = y + tokens.to(tl.int64)[:, None] * y_stride + (column + n)[None, :]
    inside = live[:, None] & (n < size)[None, :]
    total = tl.load(out, mask=inside, other=0.0).to(tl.float32) + acc * scale
    tl.store(out, rounded(total, y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class LoraProduct:
    """The adapters' product for one fused group in one step: the arguments of both launches and their intermediate."""

    y: Tensor
    x: Tensor
    h: Tensor
    lora: LoraBatch
    layer: int
    projection: int
    out_features: tuple[int, ...]
    rank_bound: int
    step: Phase
    block_m: int
    work: WorkList


class Lora:
    """Launches shrink and expand."""

    def __init__(self, run: Runner, architecture: Architecture, scratch: Scratch, *, invariant: bool) -> None:
        self._run, self._architecture, self._scratch = run, architecture, scratch
        self._invariant = invariant
        self._plans = Plans(run)
        self._ranks = RankBound()

    def begin_step(self) -> None:
        """See `Kernels.begin_step`."""
        self._plans.forget()

    def product(
        self, y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int
    ) -> LoraProduct | None:
        """The product that `shrink` and then `expand` add to y, see `Kernels.lora_apply`; None if there is none."""
        _check(y, x, out_features, lora, layer, projection)
        known = lora.tables.rank_bound
        bound = self._ranks.of(lora.tables.parts) if known is None else known
        if len(x) == 0 or bound == 0:
            return None
        step = phase(len(x), len(lora.segment_slots), invariant=self._invariant)
        blocks = SHRINK[step, width(x.shape[1]), self._architecture]
        block_m = rows(blocks.block_m, x.dtype.itemsize)
        assert block_m == rows(EXPAND[step, self._architecture].block_m, x.dtype.itemsize), (
            "shrink and expand share their items"
        )
        return LoraProduct(
            y=y,
            x=x,
            h=self._scratch.take("lora", len(x) * blocks.split_k * len(out_features) * bound, x.device),
            lora=lora,
            layer=layer,
            projection=projection,
            out_features=tuple(out_features),
            rank_bound=bound,
            step=step,
            block_m=block_m,
            work=self._plans.get(lora.segments, lora.segment_slots, len(x), block_m),
        )

    def shrink(self, product: LoraProduct) -> None:
        """Write h; does not read the base product's output."""
        x, tables, count = product.x, product.lora.tables, len(product.out_features)
        blocks = self._shrink_blocks(product)
        arguments = (
            *(x, pages_of_layer(tables.pool, product.layer, x.dtype), tables.adapter_pages, tables.parts),
            *(product.work.items, product.h, x.stride(0), x.shape[1], *_table_strides(product), product.rank_bound),
        )
        constants = {
            "NUM_PROJECTIONS": count,
            "TILES_PER_PAGE": tables.pool.shape[2] // tile_bytes(x.dtype),
            "BLOCK_M": product.block_m,
            "TILES_K": blocks.tiles_k,
            "BLOCK_R": blocks.block_r,
            "SPLIT_K": blocks.split_k,
            "LANES": blocks.lanes,
        }
        grid = (product.work.capacity, blocks.split_k, count * blocks.lanes)
        self._run(Launch(shrink, grid, arguments, constants, blocks.num_warps, blocks.num_stages))

    def expand(self, product: LoraProduct) -> None:
        """Add h B to y."""
        y, x, tables, sizes = product.y, product.x, product.lora.tables, product.out_features
        blocks = EXPAND[product.step, self._architecture]
        n0, n1, n2 = (*sizes, 0, 0)[:MAX_PROJECTIONS]
        tiles_n = blocks.tiles_of(x.dtype)
        check_in_place(product.block_m * tiles_n * TILE_COLUMNS, blocks.num_warps)
        arguments = (
            *(y, product.h, pages_of_layer(tables.pool, product.layer, x.dtype), tables.adapter_pages, tables.parts),
            *(tables.scales, product.work.items, y.stride(0), x.shape[1], n0, n1, n2, *_table_strides(product)),
            product.rank_bound,
        )
        constants = {
            "NUM_PROJECTIONS": len(sizes),
            "TILES_PER_PAGE": tables.pool.shape[2] // tile_bytes(x.dtype),
            "BLOCK_M": product.block_m,
            "TILES_N": tiles_n,
            "BLOCK_R": blocks.block_r,
            "SPLIT_K": self._shrink_blocks(product).split_k,
        }
        grid = (product.work.capacity, sum(-(-column_tiles(n) // tiles_n) for n in sizes))
        self._run(Launch(expand, grid, arguments, constants, blocks.num_warps, blocks.num_stages))

    def _shrink_blocks(self, product: LoraProduct) -> ShrinkBlocks:
        return SHRINK[product.step, width(product.x.shape[1]), self._architecture]


class RankBound:
    """The largest rank in the tables, which is the row length of the intermediate; read back whenever they change.

    Only torch operators may write a table in place, since a change is detected by its version.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, int]] = {}

    def of(self, parts: Tensor) -> int:
        """The largest padded rank, rounded up to 16; 0 when no adapter has any projection."""
        assert not parts.is_inference(), "changes to a table created in inference mode cannot be detected"
        known = self._known.get(id(parts))
        if known is None or known[1] != version(parts):
            if len(self._known) >= TABLES_KEPT:
                self._known.clear()
            largest = int(parts[..., 1].max()) if parts.numel() else 0
            known = self._known[id(parts)] = parts, version(parts), -(-largest // RANK_STEP) * RANK_STEP
        return known[2]


def pages_of_layer(pool: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """One layer's pages as values, [P, values], a view."""
    return pool[layer].view(dtype)


def _table_strides(product: LoraProduct) -> tuple[int, int, int]:
    """(row of adapter_pages, slot of parts, row of this layer and projection within a slot)."""
    tables = product.lora.tables
    projections = tables.parts.shape[2]
    return tables.adapter_pages.shape[1], tables.parts[0].numel(), product.layer * projections + product.projection


def _check(y: Tensor, x: Tensor, out_features: Sequence[int], lora: LoraBatch, layer: int, projection: int) -> None:
    tables = lora.tables
    assert 1 <= len(out_features) <= MAX_PROJECTIONS
    assert projection + len(out_features) <= tables.parts.shape[2]
    assert 0 <= layer < tables.pool.shape[0] == tables.parts.shape[1]
    assert tables.pool.dtype == torch.uint8
    assert tables.pool.is_contiguous()
    assert tables.pool.shape[2] % tile_bytes(x.dtype) == 0, "a page must hold whole tiles"
    assert tables.parts.dtype == tables.adapter_pages.dtype == torch.int32
    assert tables.scales.dtype == torch.float32
    for table in (tables.parts, tables.adapter_pages, tables.scales):
        assert table.is_contiguous()
    assert x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert y.dtype in (x.dtype, torch.float32)
    assert y.shape == (len(x), sum(out_features))
    assert x.stride(1) == y.stride(1) == 1
