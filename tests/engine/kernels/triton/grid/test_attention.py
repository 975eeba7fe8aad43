"""Attention over pages and the KV write against the reference; scratch and KV that no token may see are NaN."""

import dataclasses
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from engine.kernels import AttentionBatch, KvCache, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton import TritonKernels, attention
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.table import ATTENTION
from tests.engine.kernels.cases import Sequences, random_matrix, sequences
from tests.engine.kernels.triton.grid.device import BF16, DTYPES, FP16, FP32, OnDevice, grid, run_here

LAYER = 1
STEPS = {
    "decode": [(0, 1), (15, 1), (16, 1), (62, 1), (132, 1)],
    "long": [(700, 1), (3, 1), (255, 1), (256, 1)],
    "prefill": [(0, 63), (0, 1), (30, 7), (133, 3)],
    "mixed": [(5, 2), (9, 1), (0, 0), (40, 3)],
    "chunk": [(300, 1), (0, 40), (700, 1), (0, 0), (20, 70), (255, 1), (0, 1)],
    "one": [(30, 40)],
    "deep": [(4095, 1), (3, 1), (4096, 1)],
}
HEADS = [(9, 3, 64, 16), (4, 4, 128, 32), (8, 1, 80, 7), (2, 2, 6, 5), (64, 1, 16, 16), (3, 3, 256, 1), (7, 1, 128, 16)]

QUICK = [
    (BF16, "decode", 0),
    (BF16, "long", 20),
    (BF16, "prefill", 0),
    (FP16, "prefill", 20),
    (FP16, "mixed", 0),
    (FP32, "long", 0),
    (FP32, "mixed", 1),
    (BF16, "chunk", 0),
    (FP32, "chunk", 20),
    (BF16, "one", 0),
    (FP32, "deep", 0),
]
FULL = list(product(DTYPES, STEPS, [0, 1, 20]))


def attend(kernels: object, case: Sequences, q: Tensor, dtype: torch.dtype, window: int = 0) -> Tensor:
    out = torch.full((len(q), case.num_heads * case.kv.head_dim), torch.nan, dtype=dtype)
    scale = case.kv.head_dim**-0.5
    kernels.paged_attention(q, case.kv, LAYER, case.batch, case.num_heads, scale, out, window)  # type: ignore[attr-defined]
    return out


def queries(case: Sequences, dtype: torch.dtype) -> Tensor:
    return random_matrix(case.num_tokens, case.num_heads * case.kv.head_dim, dtype, 1, 2.0)


@pytest.mark.parametrize(("dtype", "step", "window"), grid(QUICK, FULL))
def test_attention_equals_the_reference_and_repeats_bit_for_bit(
    kernels: OnDevice, dtype: torch.dtype, step: str, window: int
) -> None:
    case = sequences(STEPS[step], dtype)
    q = queries(case, dtype)
    y = attend(kernels, case, q, dtype, window)
    assert error(y, attend(reference, case, q, FP32, window)) < TOLERANCE[dtype]
    assert torch.equal(y, attend(kernels, case, q, dtype, window))


@pytest.mark.parametrize(("dtype", "heads"), grid([(BF16, h) for h in HEADS[:4:2]], list(product(DTYPES, HEADS))))
@pytest.mark.parametrize("lengths", [[(0, 7), (20, 1), (3, 39)], [(30, 1), (0, 1)]], ids=["prefill", "decode"])
def test_attention_equals_the_reference_for_every_head_layout(
    kernels: OnDevice, dtype: torch.dtype, heads: tuple[int, int, int, int], lengths: list[tuple[int, int]]
) -> None:
    case = sequences(lengths, dtype, *heads)
    q = queries(case, dtype)
    assert error(attend(kernels, case, q, dtype), attend(reference, case, q, FP32)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", grid([BF16], list(DTYPES)))
@pytest.mark.parametrize("step", ["long", "chunk"])
def test_decode_does_not_split_the_context_if_the_parts_would_need_too_much_memory(
    kernels: OnDevice, dtype: torch.dtype, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are counted for one token per sequence, for any number of tokens in the other sequences."""
    case, names = sequences(STEPS[step], dtype), list[str]()
    prefill = ["attend"] if step == "chunk" else []

    def watched(launch: Launch) -> None:
        names.append(launch.name)
        run_here(launch)

    backend = TritonKernels(watched)
    backend.scratch.poisoned = True
    watching = OnDevice(backend, kernels.device)
    q = queries(case, dtype)
    num_parts = -(-case.batch.block_tables.shape[1] * case.tokens_per_page // 256)
    num_bytes = len(case.batch.context_lens) * case.num_heads * num_parts * case.kv.head_dim * 4
    expected = attend(reference, case, q, FP32)
    for bound, launched in ((num_bytes, ["attend", "combine"]), (num_bytes - 1, ["attend"])):
        monkeypatch.setattr(attention, "MAX_SPLIT_BYTES", bound)
        names.clear()
        assert error(attend(watching, case, q, dtype), expected) < TOLERANCE[dtype]
        assert [name for name in names if name != "list_items"] == prefill + launched


@pytest.mark.parametrize(
    ("step", "invariant", "launched"),
    [
        ("decode", False, [("decode", "attend"), ("", "combine")]),
        ("one", False, [("prefill", "attend")]),
        ("chunk", False, [("prefill", "attend"), ("decode", "attend"), ("", "combine")]),
        ("decode", True, [("invariant", "attend")]),
        ("one", True, [("invariant", "attend")]),
        ("chunk", True, [("invariant", "attend")]),
    ],
)
def test_sequences_of_one_token_use_the_decode_blocks_and_the_others_the_prefill_blocks(
    step: str, invariant: bool, launched: list[tuple[str, str]]
) -> None:
    case, started = sequences(STEPS[step], BF16), list[Launch]()
    kernels = TritonKernels(started.append, 90, batch_invariant=invariant)
    attend(kernels, case, queries(case, BF16), BF16)
    own = [launch for launch in started if launch.name != "list_items"]
    assert [launch.name for launch in own] == [name for _, name in launched]
    for (blocks, _), launch in zip(launched, own, strict=True):
        if blocks:
            assert launch.constants["PARTITION"] == ATTENTION[blocks, 90].partition  # type: ignore[index]
            assert launch.constants["BLOCK_C"] == ATTENTION[blocks, 90].block_c  # type: ignore[index]
    assert len(started) - len(own) == (2 if step == "chunk" and not invariant else 1)


def test_the_grids_do_not_depend_on_which_sequences_decode() -> None:
    grids = set()
    for lengths in ([(60, 1), (0, 40), (7, 3)], [(20, 40), (27, 2), (61, 2)], [(20, 42), (60, 1), (61, 1)]):
        case, started = sequences(lengths, BF16), list[Launch]()
        attend(TritonKernels(started.append, 90), case, queries(case, BF16), BF16)
        grids.add(tuple((launch.name, launch.grid) for launch in started))
    assert len(grids) == 1


@pytest.mark.parametrize("dtype", grid([BF16], list(DTYPES)))
def test_a_decoded_token_is_the_same_with_and_without_prefill_in_the_step(
    kernels: OnDevice, dtype: torch.dtype
) -> None:
    case = sequences(STEPS["chunk"], dtype)
    q = queries(case, dtype)
    y = attend(kernels, case, q, dtype)
    batch = case.batch
    for sequence in (0, 2, 5, 6):
        row = int(batch.query_starts[sequence])
        one = slice(sequence, sequence + 1)
        own = AttentionBatch(batch.block_tables[one], torch.tensor([0, 1], dtype=torch.int32), batch.context_lens[one])
        alone = dataclasses.replace(case, batch=own)
        assert torch.equal(attend(kernels, alone, q[row : row + 1], dtype)[0], y[row])


@pytest.mark.parametrize("dtype", grid([BF16], list(DTYPES)))
def test_invariant_attention_of_a_sequence_is_the_same_alone_and_in_any_step(
    kernels: OnDevice, dtype: torch.dtype
) -> None:
    """Bit for bit, also if the sequence is computed in chunks."""
    ours = OnDevice(TritonKernels(run_here, batch_invariant=True), kernels.device)
    case = sequences(STEPS["chunk"], dtype)
    q = queries(case, dtype)
    y = attend(ours, case, q, dtype)
    batch, starts = case.batch, case.batch.query_starts.tolist()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        one = slice(sequence, sequence + 1)
        for first, last in ((start, end), (start, start + 1), (end - 1, end)) if start < end else ():
            bounds = torch.tensor([0, last - first], dtype=torch.int32)
            own = AttentionBatch(batch.block_tables[one], bounds, batch.context_lens[one] - (end - last))
            alone = dataclasses.replace(case, batch=own)
            assert torch.equal(attend(ours, alone, q[first:last], dtype), y[first:last])


def rope_table(positions: int, rotary_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()


def test_in_decode_a_token_is_the_same_alone_and_with_longer_sequences(kernels: OnDevice) -> None:
    together, alone = sequences([(40, 1), (300, 1)], BF16), sequences([(40, 1)], BF16)
    q = queries(together, BF16)
    both = attend(kernels, together, q, BF16)
    assert torch.equal(attend(kernels, alone, q[:1], BF16)[0], both[0])


ROPE = [(64, 64), (64, 32), (24, 24), (128, 0), (6, 4)]


@pytest.mark.parametrize(
    ("dtype", "dims", "norms"),
    grid(
        [(BF16, ROPE[0], True), (FP16, ROPE[1], False), (FP32, ROPE[3], True), (FP32, ROPE[4], True)],
        list(product(DTYPES, ROPE, [False, True])),
    ),
)
def test_rope_writes_keys_and_values_to_their_pages(
    kernels: OnDevice, dtype: torch.dtype, dims: tuple[int, int], norms: bool
) -> None:
    head_dim, rotary_dim = dims
    case = sequences([(0, 9), (30, 1), (7, 3)], dtype, head_dim=head_dim, tokens_per_page=8)
    width = (case.num_heads + 2 * case.kv.num_kv_heads) * head_dim
    qkv = random_matrix(case.num_tokens, width, dtype, 4)
    cos_sin = rope_table(64, rotary_dim) if rotary_dim else None
    q_norm, k_norm = (random_matrix(1, head_dim, dtype, s)[0] for s in (8, 9)) if norms else (None, None)
    rows, expected = qkv.clone(), qkv.clone()
    kv, expected_kv = (KvCache(case.kv.pool.clone(), case.kv.num_kv_heads, head_dim) for _ in range(2))
    kernels.rope_write_kv(rows, kv, LAYER, case.batch, case.num_heads, cos_sin, q_norm, k_norm, 1e-6)
    reference.rope_write_kv(expected, expected_kv, LAYER, case.batch, case.num_heads, cos_sin, q_norm, k_norm, 1e-6)
    assert error(rows, expected) < TOLERANCE[dtype]
    written, rest = places(kv, case, dtype)
    expected_written, expected_rest = places(expected_kv, case, dtype)
    assert error(written, expected_written) < TOLERANCE[dtype]
    assert torch.equal(rest, expected_rest)


def places(kv: KvCache, case: Sequences, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(k and v of the step's tokens, the pool's bytes with these slots blanked out)."""
    blanked = KvCache(kv.pool.clone(), kv.num_kv_heads, kv.head_dim)
    pages, blank = (reference.kv_pages(cache, LAYER, dtype) for cache in (kv, blanked))
    found = []
    for sequence, _, position in reference.tokens_of(case.batch):
        page, slot = reference.place(case.batch, sequence, position, case.tokens_per_page)
        found.append(pages[page, :, :, slot])
        blank[page, :, :, slot] = 0
    return torch.stack(found), blanked.pool
