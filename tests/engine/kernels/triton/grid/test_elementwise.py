"""Norms, activation, embedding, base product and logit statistics against the reference."""

from itertools import product

import pytest
import torch

from engine.kernels import reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.triton.launch import THREADS_PER_WARP, Launch, check_in_place
from tests.engine.kernels.cases import TOKENS, random_matrix
from tests.engine.kernels.triton.grid.device import BF16, DTYPES, FP16, FP32, INTERPRETED, OnDevice, grid, run_here

ROWS = grid(
    [(BF16, 7, 576), (FP16, 3, 2049), (FP32, 1, 5), (BF16, 63, 64)], list(product(DTYPES, TOKENS, [64, 576, 2049, 5]))
)


@pytest.mark.parametrize(("dtype", "num_tokens", "width"), ROWS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(kernels: OnDevice, dtype: torch.dtype, num_tokens: int, width: int, has_residual: bool) -> None:
    x, weight = random_matrix(num_tokens, width, dtype, 1, 3.0), random_matrix(1, width, dtype, 2)[0]
    ours, theirs = (random_matrix(num_tokens, width, dtype, 3) if has_residual else None for _ in range(2))
    out, expected = torch.full_like(x, torch.nan), torch.empty(num_tokens, width)
    kernels.rms_norm(x, weight, 1e-5, out, ours)
    reference.rms_norm(x, weight, 1e-5, expected, theirs)
    assert error(out, expected) < TOLERANCE[dtype]
    if ours is not None and theirs is not None:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("width", [1, 5, 16, 31, 33, 64, 100, 576, 4096])
def test_a_norm_has_no_more_threads_than_columns_in_a_block(width: int) -> None:
    """The residual is changed in place: a column that two threads load could be changed twice."""
    from engine.kernels.triton import TritonKernels

    started: list[Launch] = []
    x, residual = torch.empty(3, width), torch.empty(3, width)
    TritonKernels(started.append, 90).rms_norm(x, torch.empty(width), 1e-5, torch.empty(3, width), residual)
    [launch] = started
    block = launch.constants["BLOCK"]
    assert width <= int(block)
    assert THREADS_PER_WARP * launch.num_warps <= int(block)


def test_a_block_with_fewer_values_than_threads_must_not_be_changed_in_place() -> None:
    check_in_place(64, 2)
    with pytest.raises(AssertionError, match="64 values is too small to be changed in place by 4 warps"):
        check_in_place(64, 4)


@pytest.mark.parametrize(("dtype", "num_tokens", "width"), ROWS)
def test_silu_mul(kernels: OnDevice, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = random_matrix(num_tokens, 2 * width, dtype, 1, 4.0)
    gate_up[0, 0], gate_up[-1, width - 1] = -100.0, 100.0
    out, expected = torch.full((num_tokens, width), torch.nan, dtype=dtype), torch.empty(num_tokens, width)
    kernels.silu_mul(gate_up, out)
    reference.silu_mul(gate_up, expected)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [33, 2050])
def test_embedding_rows_are_the_weight_rows(kernels: OnDevice, dtype: torch.dtype, hidden: int) -> None:
    weight, ids = random_matrix(150, hidden, dtype, 1), torch.tensor([149, 0, 63, 0])
    out = torch.empty(len(ids), hidden, dtype=dtype)
    kernels.embed(ids, kernels.pack_linear([weight]), out)
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 63])
@pytest.mark.parametrize("sizes", [(576, 192, 192), (7, 65)])
def test_linear(kernels: OnDevice, dtype: torch.dtype, num_tokens: int, sizes: tuple[int, ...]) -> None:
    weights = [random_matrix(n, 136, dtype, n, 136**-0.5) for n in sizes]
    biases = [random_matrix(1, n, dtype, n + 1)[0] if i % 2 == 0 else None for i, n in enumerate(sizes)]
    x, expected = random_matrix(num_tokens, 136, dtype, 3), torch.empty(num_tokens, sum(sizes))
    reference.linear(x, reference.pack_linear(weights, biases), expected)
    for out_dtype in {dtype, FP32}:
        out = torch.full((num_tokens, sum(sizes)), torch.nan, dtype=out_dtype)
        kernels.linear(x, kernels.pack_linear(weights, biases), out)
        assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [1, 15, 100, 49152])
def test_logit_stats(kernels: OnDevice, size: int) -> None:
    logits = random_matrix(7, size, FP32, 5, 6.0)
    logits[1] = -1000.0 - torch.arange(size) * 0.5
    logits[2] = 3.0
    logits[3, : size // 2] = float("-inf")
    logits[4] = float("-inf")
    argmax, logsumexp = kernels.logit_stats(logits)
    assert torch.equal(argmax, logits.argmax(dim=-1))
    some = torch.arange(7) != 4
    assert logsumexp[4] == float("-inf")
    assert error(logsumexp[some, None], torch.logsumexp(logits[some].double(), dim=-1)[:, None]) < TOLERANCE[FP32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_invariant_product_equals_the_reference_and_is_the_same_for_a_single_row(
    dtype: torch.dtype, has_bias: bool
) -> None:
    """With more rows than one block."""
    from engine.kernels.triton import TritonKernels

    kernels = OnDevice(TritonKernels(run_here, batch_invariant=True), "cpu" if INTERPRETED else "cuda")
    weight, x = random_matrix(75, 136, dtype, 1, 136**-0.5), random_matrix(70, 136, dtype, 3)
    biases = [random_matrix(1, 75, dtype, 2)[0]] if has_bias else []
    packed, expected = kernels.pack_linear([weight], biases), torch.empty(70, 75)
    reference.linear(x, reference.pack_linear([weight], biases), expected)
    for out_dtype in {dtype, FP32}:
        together = torch.full((70, 75), torch.nan, dtype=out_dtype)
        kernels.linear(x, packed, together)
        assert error(together, expected) < TOLERANCE[dtype]
        for row in (0, 33, 69):
            alone = torch.full((1, 75), torch.nan, dtype=out_dtype)
            kernels.linear(x[row : row + 1], packed, alone)
            assert torch.equal(alone[0], together[row])
