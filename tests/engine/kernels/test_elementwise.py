"""Norms, the gated activation and logit statistics."""

import pytest
import torch

from engine.kernels import Kernels, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.cpu import CpuKernels
from tests.engine.kernels.cases import TOKENS, random_matrix

DTYPES = (torch.bfloat16, torch.float32)
WIDTHS = (64, 576, 2049, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_reference(kernels: Kernels, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    x, weight = random_matrix(num_tokens, width, dtype, 1, 3.0), random_matrix(1, width, dtype, 2)[0]
    for residual in (None, random_matrix(num_tokens, width, dtype, 3)):
        sums = [None, None] if residual is None else [residual.clone(), residual.clone()]
        out, expected = torch.full_like(x, float("nan")), torch.empty(num_tokens, width)
        kernels.rms_norm(x, weight, 1e-5, out, sums[0])
        reference.rms_norm(x, weight, 1e-5, expected, sums[1])
        assert error(out, expected) < TOLERANCE[dtype]
        if sums[0] is not None and sums[1] is not None:
            assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_equals_the_reference(kernels: Kernels, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = random_matrix(num_tokens, 2 * width, dtype, 1, 4.0)
    gate_up[0, 0], gate_up[-1, width - 1] = -100.0, 100.0
    out, expected = torch.full((num_tokens, width), float("nan"), dtype=dtype), torch.empty(num_tokens, width)
    kernels.silu_mul(gate_up, out)
    reference.silu_mul(gate_up, expected)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_result_alone_and_in_a_batch(compiled: CpuKernels, dtype: torch.dtype) -> None:
    x, weight = random_matrix(133, 576, dtype, 1), random_matrix(1, 576, dtype, 2)[0]
    together, alone = torch.empty_like(x), torch.empty_like(x[:1])
    compiled.rms_norm(x, weight, 1e-5, together)
    compiled.rms_norm(x[100:101], weight, 1e-5, alone)
    assert torch.equal(alone[0], together[100])


@pytest.mark.parametrize("size", [1, 15, 16, 100, 49152])
def test_logit_stats_equal_torch(kernels: Kernels, size: int) -> None:
    logits = random_matrix(7, size, torch.float32, 5, 6.0)
    logits[1] = -1000.0 - torch.arange(size) * 0.5
    logits[2] = 3.0
    logits[3, : size // 2] = float("-inf")  # a grammar or top-k mask
    argmax, logsumexp = kernels.logit_stats(logits)
    assert torch.equal(argmax, logits.argmax(dim=-1))
    assert error(logsumexp[:, None], torch.logsumexp(logits.double(), dim=-1)[:, None]) < TOLERANCE[torch.float32]
