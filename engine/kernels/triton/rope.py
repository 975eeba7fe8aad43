"""Rotary position embedding and the KV write, with the norm of queries and keys if the model has one, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.attention import check_batch, page_tokens
from engine.kernels.triton.launch import THREADS_PER_WARP, Launch, Runner, check_in_place
from engine.kernels.triton.plan import Plans
from engine.kernels.triton.table import ROWS
from engine.kernels.triton.tiles import rounded
from engine.kernels.types import AttentionBatch, KvCache


@triton.jit
def norm_weight(q_norm, k_norm, columns, inside, is_q, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr):
    """fp32 [heads, columns]: the norm's weights of each head, 0 if it has none."""
    q_weight = tl.zeros_like(columns).to(tl.float32)
    k_weight = q_weight
    if HAS_Q_NORM:
        q_weight = tl.load(q_norm + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_K_NORM:
        k_weight = tl.load(k_norm + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def rope_write_kv(
    qkv,
    kv,
    block_tables,
    query_starts,
    context_lens,
    items,
    cos_sin,
    q_norm,
    k_norm,
    qkv_stride,
    table_stride,
    page_values,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TOKENS_PER_PAGE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """q, k = v / sqrt(mean(v^2) + eps) w if normed; (a, b) = (a cos - b sin, b cos + a sin); k, v -> their pages.

    qkv: [T, (H + 2 G) D] in place; a and b are columns i and i + ROTARY_DIM / 2 of a head, the columns past ROTARY_DIM
    are not rotated; kv: one layer's pages [2, G, TOKENS_PER_PAGE, D]; cos_sin: fp32 [positions, ROTARY_DIM].
    Grid: (items of one token, blocks of BLOCK_H heads of q, k and v). In fp32; the norm's result is rounded before the
    rotation.
    """
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item).to(tl.int64)
    if sequence < 0:
        return
    token = tl.load(item + 1)
    position = tl.load(context_lens + sequence) - tl.load(query_starts + sequence + 1) + token
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    live = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    i = tl.arange(0, BLOCK_P)
    u = ROTARY_DIM + tl.arange(0, BLOCK_U)
    row = qkv + token.to(tl.int64) * qkv_stride + (heads * HEAD_DIM)[:, None]
    in_pair = live[:, None] & (i < HALF)[None, :]
    in_rest = live[:, None] & (u < HEAD_DIM)[None, :]
    a = tl.load(row + i[None, :], mask=in_pair, other=0.0).to(tl.float32)
    b = tl.load(row + (i + HALF)[None, :], mask=in_pair, other=0.0).to(tl.float32)
    rest = tl.load(row + u[None, :], mask=in_rest, other=0.0).to(tl.float32)

    if HAS_Q_NORM or HAS_K_NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        factor = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        normed = (is_q & HAS_Q_NORM) | (~is_q & ~is_v & HAS_K_NORM)
        a_weight = norm_weight(q_norm, k_norm, i, i < HALF, is_q, HAS_Q_NORM, HAS_K_NORM)
        b_weight = norm_weight(q_norm, k_norm, i + HALF, i < HALF, is_q, HAS_Q_NORM, HAS_K_NORM)
        rest_weight = norm_weight(q_norm, k_norm, u, u < HEAD_DIM, is_q, HAS_Q_NORM, HAS_K_NORM)
        a = tl.where(normed[:, None], rounded(a * factor * a_weight, qkv.dtype.element_ty).to(tl.float32), a)
        b = tl.where(normed[:, None], rounded(b * factor * b_weight, qkv.dtype.element_ty).to(tl.float32), b)
        rest = tl.where(
            normed[:, None], rounded(rest * factor * rest_weight, qkv.dtype.element_ty).to(tl.float32), rest
        )

    if ROTARY_DIM > 0:
        turn = cos_sin + position.to(tl.int64) * ROTARY_DIM + i
        cos = tl.load(turn, mask=i < HALF, other=1.0)[None, :]
        sin = tl.load(turn + HALF, mask=i < HALF, other=0.0)[None, :]
        turned = a * cos - b * sin
        b = tl.where(is_v[:, None], b, b * cos + a * sin)
        a = tl.where(is_v[:, None], a, turned)

    left = rounded(a, qkv.dtype.element_ty)
    right = rounded(b, qkv.dtype.element_ty)
    tail = rounded(rest, qkv.dtype.element_ty)
    changed = (~is_v)[:, None]
    tl.store(row + i[None, :], left, mask=in_pair & changed)
    tl.store(row + (i + HALF)[None, :], right, mask=in_pair & changed)
    tl.store(row + u[None, :], tail, mask=in_rest & changed)
    page = tl.load(block_tables + sequence * table_stride + position // TOKENS_PER_PAGE).to(tl.int64)
    place = (heads - NUM_HEADS) * TOKENS_PER_PAGE + position % TOKENS_PER_PAGE
    cells = kv + page * page_values + (place * HEAD_DIM)[:, None]
    stored = (~is_q)[:, None]
    tl.store(cells + i[None, :], left, mask=in_pair & stored)
    tl.store(cells + (i + HALF)[None, :], right, mask=in_pair & stored)
    tl.store(cells + u[None, :], tail, mask=in_rest & stored)


class Rope:
    """Launches the rotation and the KV write."""

    def __init__(self, run: Runner, plans: Plans) -> None:
        self._run, self._plans = run, plans

    def apply(
        self,
        qkv: Tensor,
        kv: KvCache,
        layer: int,
        batch: AttentionBatch,
        num_heads: int,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        """See `Kernels.rope_write_kv`."""
        total_heads, rotary = num_heads + 2 * kv.num_kv_heads, 0 if cos_sin is None else cos_sin.shape[1]
        _check(qkv, kv, layer, batch, total_heads, cos_sin)
        work = self._plans.get(batch.query_starts, None, len(qkv), 1)
        pages, blocks = kv.pool[layer].view(qkv.dtype), ROWS["rope_write_kv"]
        least = -(-THREADS_PER_WARP * blocks.num_warps // blocks.block)
        block_p = triton.next_power_of_2(max(rotary // 2, least))
        block_u = triton.next_power_of_2(max(kv.head_dim - rotary, least))
        check_in_place(blocks.block * min(block_p, block_u), blocks.num_warps)
        arguments = (
            *(qkv, pages, batch.block_tables, batch.query_starts, batch.context_lens, work.items),
            *(cos_sin, q_norm, k_norm, qkv.stride(0), batch.block_tables.stride(0), pages.shape[1], eps),
        )
        constants = {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": kv.num_kv_heads,
            "HEAD_DIM": kv.head_dim,
            "ROTARY_DIM": rotary,
            "TOKENS_PER_PAGE": page_tokens(kv, qkv.dtype),
            "HAS_Q_NORM": q_norm is not None,
            "HAS_K_NORM": k_norm is not None,
            "BLOCK_H": blocks.block,
            "BLOCK_P": block_p,
            "BLOCK_U": block_u,
        }
        grid = (work.capacity, -(-total_heads // blocks.block))
        self._run(Launch(rope_write_kv, grid, arguments, constants, blocks.num_warps, 1))


def _check(
    qkv: Tensor, kv: KvCache, layer: int, batch: AttentionBatch, total_heads: int, cos_sin: Tensor | None
) -> None:
    check_batch(kv, layer, batch)
    assert qkv.shape[1] == total_heads * kv.head_dim
    assert qkv.stride(1) == 1
    if cos_sin is not None:
        assert cos_sin.is_contiguous()
        assert cos_sin.element_size() == 4
        assert cos_sin.shape[1] % 2 == 0
        assert cos_sin.shape[1] <= kv.head_dim
