"""Attention over pages: one kernel for decode and chunked prefill, over query rows and parts of the context.

A step of several sequences may contain both. Sequences with one new token use the decode blocks, which split the
context over programs; the others use the prefill blocks, which read it once for many tokens: two launches, two lists.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, Runner, Scratch
from engine.kernels.triton.plan import ANY, ONE, SEVERAL, Lengths, Plans, WorkList
from engine.kernels.triton.table import (
    ATTENTION,
    COMBINED_PARTS,
    FLOAT32_BYTES,
    MIN_DOT,
    ROWS,
    Architecture,
    AttentionBlocks,
    Phase,
    rows,
)
from engine.kernels.triton.tiles import dot_narrow, dot_shares, rounded
from engine.kernels.types import AttentionBatch, KvCache

LOG2_E = math.log2(math.e)

MAX_SPLIT_BYTES = 256 << 20
"""Limit for the parts' outputs. Splitting keeps the device busy when there are few rows. Beyond this limit there are
enough rows, and one long context would need gigabytes (4.3 GB for 512 rows, 32 heads and a context of 128k).
"""


@triton.jit(do_not_specialize=["table_stride", "window", "num_parts"])
def attend(
    q,
    kv,
    block_tables,
    query_starts,
    context_lens,
    items,
    out,
    partial,
    stats,
    q_stride,
    out_stride,
    table_stride,
    page_values,
    num_parts,
    window,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS_PER_PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """out[t, h] = sum over p of softmax_p(scale q[t, h] k[p]) v[p], over positions max(0, at - window + 1) .. at.

    q: [T, >= H D]; kv: one layer's pages [2, G, TOKENS_PER_PAGE, D]; out: [T, H D].
    Grid: (items, KV heads, parts of the context). An item is up to BLOCK_Q new tokens of one sequence; a program
    computes them for all query heads of a KV head, BLOCK_Q * BLOCK_G rows. Scores, the sums of weights and the output
    are accumulated in fp32 over positions in order. With PARTITION = 0 the whole context is one part and `out` is
    written. Otherwise an item is one token, and part i covers the positions from i * PARTITION; it is written to
    partial: fp32 [items, H, parts, D] and stats: fp32 [items, H, parts, 2] = (largest score, sum), for `combine`. A
    part without visible positions has sum 0.
    """
    item = items + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    sequence = tl.load(item).to(tl.int64)
    if sequence < 0:
        return
    start = tl.load(item + 1)
    end = tl.load(item + 2)
    past = tl.load(context_lens + sequence) - tl.load(query_starts + sequence + 1)
    low = 0
    high = past + end
    if window > 0:
        low = tl.maximum(past + start - window + 1, 0)
    if PARTITION > 0:
        if part * PARTITION >= high:
            return
        low = tl.maximum(low, part * PARTITION)
        high = tl.minimum(high, (part + 1) * PARTITION)
    low = low // BLOCK_C * BLOCK_C

    m = tl.arange(0, BLOCK_Q * BLOCK_G)
    tokens = start + m // BLOCK_G
    heads = kv_head * GROUP + m % BLOCK_G
    live = (tokens < end) & (m % BLOCK_G < GROUP)
    seen_to = past + tokens
    d = tl.arange(0, BLOCK_D)
    q_cells = q + tokens.to(tl.int64)[:, None] * q_stride + (heads * HEAD_DIM)[:, None] + d[None, :]
    queries = tl.load(q_cells, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    largest = tl.full([BLOCK_Q * BLOCK_G], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_Q * BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_D], dtype=tl.float32)
    table = block_tables + sequence * table_stride
    for first in range(low, high, BLOCK_C):
        p = first + tl.arange(0, BLOCK_C)
        known = p < high
        page = tl.load(table + p // TOKENS_PER_PAGE, mask=known, other=0).to(tl.int64)
        row = page * page_values + (kv_head * TOKENS_PER_PAGE + p % TOKENS_PER_PAGE) * HEAD_DIM
        cells = kv + row[:, None] + d[None, :]
        inside = known[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(cells, mask=inside, other=0.0)
        values = tl.load(cells + NUM_KV_HEADS * TOKENS_PER_PAGE * HEAD_DIM, mask=inside, other=0.0)
        scores = dot_narrow(queries, tl.trans(keys), tl.zeros([BLOCK_Q * BLOCK_G, BLOCK_C], dtype=tl.float32))
        visible = known[None, :] & (p[None, :] <= seen_to[:, None])
        if window > 0:
            visible = visible & (p[None, :] > seen_to[:, None] - window)
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        shares = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(largest - base)
        weight = weight * shrunk + tl.sum(shares, axis=1)
        acc = dot_shares(shares, values, acc * shrunk[:, None])
        largest = now

    kept = live[:, None] & (d < HEAD_DIM)[None, :]
    if PARTITION > 0:
        place = (tl.program_id(0).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_parts + part
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc, mask=kept)
        tl.store(stats + place * 2, largest, mask=live)
        tl.store(stats + place * 2 + 1, weight, mask=live)
    else:
        out_cells = out + tokens.to(tl.int64)[:, None] * out_stride + (heads * HEAD_DIM)[:, None] + d[None, :]
        total = tl.where(weight == 0.0, 1.0, weight)
        tl.store(out_cells, rounded(acc / total[:, None], out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_parts"])
def combine(
    partial,
    stats,
    query_starts,
    context_lens,
    items,
    out,
    out_stride,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """out[t, h] = sum_i e^(m_i - m) o_i / sum_i e^(m_i - m) l_i over the parts i of the token's context, m = max_i m_i.

    partial, stats: the output of `attend`. Grid: (items of one token, heads). In fp32 over blocks of BLOCK_P parts in
    order, rounded once; parts past the context are not read, so the result does not depend on the other items.
    """
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    sequence = tl.load(item)
    if sequence < 0:
        return
    token = tl.load(item + 1).to(tl.int64)
    context = tl.load(context_lens + sequence) - tl.load(query_starts + sequence + 1) + tl.load(item + 1) + 1
    d = tl.arange(0, BLOCK_D)
    place = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * num_parts
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    weight = tl.full([], 0.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    own_parts = tl.cdiv(context, PARTITION)
    for first in range(0, own_parts, BLOCK_P):
        parts = first + tl.arange(0, BLOCK_P)
        own = parts < own_parts
        m = tl.load(stats + (place + parts) * 2, mask=own, other=float("-inf"))
        sums = tl.load(stats + (place + parts) * 2 + 1, mask=own, other=0.0)
        cells = partial + (place + parts)[:, None] * HEAD_DIM + d[None, :]
        outputs = tl.load(cells, mask=own[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        now = tl.maximum(largest, tl.max(m, axis=0))
        base = tl.where(now == float("-inf"), 0.0, now)
        shares = tl.exp2(m - base)
        shrunk = tl.exp2(largest - base)
        weight = weight * shrunk + tl.sum(sums * shares, axis=0)
        acc = acc * shrunk + tl.sum(outputs * shares[:, None], axis=0)
        largest = now
    y = rounded(acc / tl.where(weight == 0.0, 1.0, weight), out.dtype.element_ty)
    tl.store(out + token * out_stride + head * HEAD_DIM + d, y, mask=d < HEAD_DIM)


@dataclass(frozen=True)
class _Step:
    """The arguments of one call that both kernels use."""

    q: Tensor
    pages: Tensor
    kv: KvCache
    batch: AttentionBatch
    num_heads: int
    scale: float
    out: Tensor
    window: int

    @property
    def tokens_per_page(self) -> int:
        return page_tokens(self.kv, self.q.dtype)

    def num_parts(self, blocks: AttentionBlocks) -> int:
        """Parts of a context as long as the block tables; a recorded step is specific to their length."""
        reach = self.batch.block_tables.shape[1] * self.tokens_per_page
        return -(-reach // blocks.partition) if blocks.partition else 1


class Attention:
    """Launches attention: one kernel for sequences with several new tokens, two for sequences with one."""

    def __init__(
        self, run: Runner, architecture: Architecture, scratch: Scratch, plans: Plans, *, invariant: bool
    ) -> None:
        self._run, self._architecture, self._scratch, self._plans = run, architecture, scratch, plans
        self._invariant = invariant

    def apply(
        self,
        q: Tensor,
        kv: KvCache,
        layer: int,
        batch: AttentionBatch,
        num_heads: int,
        scale: float,
        out: Tensor,
        window: int,
    ) -> None:
        """See `Kernels.paged_attention`."""
        _check(q, kv, layer, batch, num_heads, out)
        if len(q) == 0:
            return
        step = _Step(q, kv.pool[layer].view(q.dtype), kv, batch, num_heads, scale, out, window)
        for phase, lengths in attention_phases(len(q), len(batch.context_lens), invariant=self._invariant):
            self._attend(step, lengths, ATTENTION[phase, self._architecture])

    def _attend(self, step: _Step, lengths: Lengths, blocks: AttentionBlocks) -> None:
        num_tokens = min(len(step.q), lengths.most * len(step.batch.context_lens))
        if num_tokens * _split_bytes(step, blocks) > MAX_SPLIT_BYTES:
            blocks = ATTENTION["invariant", self._architecture]
        q, kv, batch, out = step.q, step.kv, step.batch, step.out
        group = step.num_heads // kv.num_kv_heads
        block_g = triton.next_power_of_2(group)
        block_d = max(triton.next_power_of_2(kv.head_dim), MIN_DOT)
        block_q = max(rows(blocks.block_m, q.dtype.itemsize) // block_g, 1) if blocks.partition == 0 else 1
        block_g = max(block_g, MIN_DOT // block_q)
        num_parts = step.num_parts(blocks)
        work = self._plans.get(batch.query_starts, None, len(q), block_q, lengths)
        partial, stats = self._parts(step, work.capacity * num_parts if blocks.partition else 0)
        arguments = (
            *(q, step.pages, batch.block_tables, batch.query_starts, batch.context_lens, work.items),
            *(out, partial, stats, q.stride(0), out.stride(0), batch.block_tables.stride(0), step.pages.shape[1]),
            *(num_parts, step.window, step.scale * LOG2_E),
        )
        constants = {
            "NUM_KV_HEADS": kv.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": kv.head_dim,
            "TOKENS_PER_PAGE": step.tokens_per_page,
            "BLOCK_Q": block_q,
            "BLOCK_G": block_g,
            "BLOCK_C": blocks.keys_of(block_d * q.dtype.itemsize),
            "BLOCK_D": block_d,
            "PARTITION": blocks.partition,
        }
        grid = (work.capacity, kv.num_kv_heads, num_parts)
        self._run(Launch(attend, grid, arguments, constants, blocks.num_warps, blocks.num_stages))
        if blocks.partition:
            self._combine(step, work, partial, stats, blocks)

    def _parts(self, step: _Step, num_parts: int) -> tuple[Tensor, Tensor]:
        """Scratch for (outputs, statistics) of every head's parts; `num_parts` counts the parts of all items."""
        cells = num_parts * step.num_heads
        partial = self._scratch.take("attention", max(cells * step.kv.head_dim, 1), step.q.device)
        return partial, self._scratch.take("attention statistics", max(cells * 2, 1), step.q.device)

    def _combine(self, step: _Step, work: WorkList, partial: Tensor, stats: Tensor, blocks: AttentionBlocks) -> None:
        batch, out = step.batch, step.out
        arguments = (
            *(partial, stats, batch.query_starts, batch.context_lens, work.items),
            *(out, out.stride(0), step.num_parts(blocks)),
        )
        constants = {
            "NUM_HEADS": step.num_heads,
            "HEAD_DIM": step.kv.head_dim,
            "BLOCK_D": triton.next_power_of_2(step.kv.head_dim),
            "BLOCK_P": COMBINED_PARTS,
            "PARTITION": blocks.partition,
        }
        grid = (work.capacity, step.num_heads)
        self._run(Launch(combine, grid, arguments, constants, ROWS["combine"].num_warps, 1))


def attention_phases(num_tokens: int, num_sequences: int, *, invariant: bool) -> tuple[tuple[Phase, Lengths], ...]:
    """The phases of a step with the sequence lengths they cover, from the only numbers that the host knows.

    A recorded step has as many tokens as sequences, so it is a decode step. In a step that may contain both, an empty
    work list costs a launch whose programs exit immediately.
    """
    if invariant:
        return (("invariant", ANY),)
    if num_tokens <= num_sequences:
        return (("decode", ANY),)
    if num_sequences == 1:
        return (("prefill", ANY),)
    return ("prefill", SEVERAL), ("decode", ONE)


def _split_bytes(step: _Step, blocks: AttentionBlocks) -> int:
    """Bytes of the parts' outputs per token; 0 if the context is not split."""
    if blocks.partition == 0:
        return 0
    return step.num_heads * step.kv.head_dim * step.num_parts(blocks) * FLOAT32_BYTES


def page_tokens(kv: KvCache, dtype: torch.dtype) -> int:
    """Tokens that fit in a page."""
    return int(kv.pool.shape[2]) // (2 * kv.num_kv_heads * kv.head_dim * dtype.itemsize)


def _check(q: Tensor, kv: KvCache, layer: int, batch: AttentionBatch, num_heads: int, out: Tensor) -> None:
    assert num_heads % kv.num_kv_heads == 0
    assert q.shape[1] >= num_heads * kv.head_dim
    assert out.shape == (len(q), num_heads * kv.head_dim)
    assert q.stride(1) == out.stride(1) == 1
    check_batch(kv, layer, batch)


def check_batch(kv: KvCache, layer: int, batch: AttentionBatch) -> None:
    """Assert the assumptions of every kernel that reads or writes KV pages."""
    assert kv.pool.dtype == torch.uint8
    assert kv.pool.is_contiguous()
    assert 0 <= layer < len(kv.pool)
    assert batch.block_tables.dtype == batch.query_starts.dtype == batch.context_lens.dtype == torch.int32
    assert batch.block_tables.stride(1) == 1
    assert batch.query_starts.is_contiguous()
    assert batch.context_lens.is_contiguous()
    assert len(batch.query_starts) == len(batch.context_lens) + 1 == len(batch.block_tables) + 1
