"""Rope with the KV write, and attention over pages."""

import pytest
import torch
from torch import Tensor

from engine.kernels import AttentionBatch, Kernels, KvCache, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.cpu import CpuKernels
from tests.engine.kernels.cases import Sequences, random_matrix, sequences

DTYPES = (torch.bfloat16, torch.float32)
LAYER = 1
DECODE = [(0, 1), (15, 1), (16, 1), (62, 1), (132, 1)]
PREFILL = [(0, 63), (0, 1), (30, 7), (133, 3)]


def attend(kernels: Kernels, case: Sequences, q: Tensor, out_dtype: torch.dtype, window: int = 0) -> Tensor:
    out = torch.full((len(q), case.num_heads * case.kv.head_dim), float("nan"), dtype=out_dtype)
    scale = case.kv.head_dim**-0.5
    kernels.paged_attention(q, case.kv, LAYER, case.batch, case.num_heads, scale, out, window)
    return out


def queries(case: Sequences, dtype: torch.dtype) -> Tensor:
    return random_matrix(case.num_tokens, case.num_heads * case.kv.head_dim, dtype, 1, 2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [0, 1, 20])
def test_equals_the_reference(
    kernels: Kernels, dtype: torch.dtype, lengths: list[tuple[int, int]], window: int
) -> None:
    case = sequences(lengths, dtype)
    q = queries(case, dtype)
    expected = attend(reference, case, q, torch.float32, window)
    assert error(attend(kernels, case, q, dtype, window), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tokens_per_page"),
    [(9, 3, 64, 16), (4, 4, 128, 32), (8, 1, 80, 7), (2, 2, 6, 5), (64, 1, 16, 16), (3, 3, 256, 1)],
)
def test_equals_the_reference_for_every_head_layout(
    kernels: Kernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, tokens_per_page: int
) -> None:
    case = sequences([(0, 7), (20, 1), (3, 19)], dtype, num_heads, num_kv_heads, head_dim, tokens_per_page)
    q = queries(case, dtype)
    assert error(attend(kernels, case, q, dtype), attend(reference, case, q, torch.float32)) < TOLERANCE[dtype]


def one_token(case: Sequences, token: int) -> Sequences:
    """The same pages with a batch of only this token of the step."""
    starts = case.batch.query_starts
    sequence = int((starts <= token).sum()) - 1
    position = int(case.batch.context_lens[sequence] - starts[sequence + 1]) + token
    batch = AttentionBatch(
        case.batch.block_tables[sequence : sequence + 1].contiguous(),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([position + 1], dtype=torch.int32),
    )
    return Sequences(case.kv, batch, case.num_heads, case.tokens_per_page)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 5, 33])
def test_a_token_has_the_same_result_alone_in_a_batch_and_in_any_chunk(
    compiled: CpuKernels, dtype: torch.dtype, window: int
) -> None:
    case = sequences(PREFILL, dtype)
    q = queries(case, dtype)
    together = attend(compiled, case, q, dtype, window)
    for token in range(case.num_tokens):
        alone = attend(compiled, one_token(case, token), q[token : token + 1], dtype, window)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_the_page_size(compiled: CpuKernels, dtype: torch.dtype) -> None:
    small, large = (sequences(PREFILL, dtype, tokens_per_page=n) for n in (5, 32))
    q = queries(small, dtype)
    assert torch.equal(attend(compiled, small, q, dtype), attend(compiled, large, q, dtype))


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    case = sequences([(40, 3)], torch.float32)
    q = queries(case, torch.float32) * 1000
    expected = attend(reference, case, q, torch.float32)
    assert error(attend(kernels, case, q, torch.float32), expected) < 1e-3  # rounding of scores in the thousands


def rope_table(positions: int, rotary_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (24, 24), (128, 0)])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "qk-norm"])
def test_rope_writes_keys_and_values_to_their_pages(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, rotary_dim: int, norms: bool
) -> None:
    case = sequences([(0, 21), (30, 1), (7, 5)], dtype, head_dim=head_dim, tokens_per_page=8)
    width = (case.num_heads + 2 * case.kv.num_kv_heads) * head_dim
    qkv = random_matrix(case.num_tokens, width, dtype, 4)
    cos_sin = rope_table(64, rotary_dim) if rotary_dim else None
    q_norm, k_norm = (random_matrix(1, head_dim, dtype, s)[0] for s in (8, 9)) if norms else (None, None)
    actual: list[Tensor] = []
    expected: list[Tensor] = []
    for backend, into in ((kernels, actual), (reference, expected)):
        kv = KvCache(case.kv.pool.clone(), case.kv.num_kv_heads, head_dim)
        rows = qkv.clone()
        backend.rope_write_kv(rows, kv, LAYER, case.batch, case.num_heads, cos_sin, q_norm, k_norm, 1e-6)
        into += [rows, written(kv, case, dtype), kv.pool[1 - LAYER], untouched(kv, case, dtype)]
    assert error(actual[0], expected[0]) < TOLERANCE[dtype]
    assert error(actual[1], expected[1]) < TOLERANCE[dtype]
    assert torch.equal(actual[2], expected[2])
    assert torch.equal(actual[3], expected[3])


def written(kv: KvCache, case: Sequences, dtype: torch.dtype) -> Tensor:
    pages = reference.kv_pages(kv, LAYER, dtype)
    places = [reference.place(case.batch, s, p, case.tokens_per_page) for s, _, p in reference.tokens_of(case.batch)]
    return torch.stack([pages[page, :, :, slot] for page, slot in places])


def untouched(kv: KvCache, case: Sequences, dtype: torch.dtype) -> Tensor:
    """The layer's bytes with the written slots blanked out."""
    copy = KvCache(kv.pool.clone(), kv.num_kv_heads, kv.head_dim)
    pages = reference.kv_pages(copy, LAYER, dtype)
    for s, _, p in reference.tokens_of(case.batch):
        page, slot = reference.place(case.batch, s, p, case.tokens_per_page)
        pages[page, :, :, slot] = 0
    return copy.pool[LAYER]
