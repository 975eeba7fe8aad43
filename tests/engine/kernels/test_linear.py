"""The packed base product, and the embedding that reads the packed weight."""

import pytest
import torch

from engine.kernels import Kernels, reference
from engine.kernels.accuracy import TOLERANCE, error
from engine.kernels.cpu import CpuKernels
from tests.engine.kernels.cases import TOKENS, random_matrix

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, *TOKENS])
@pytest.mark.parametrize(
    ("in_features", "sizes"), [(576, (576, 192, 192)), (64, (64,)), (33, (7, 65)), (1, (1,)), (1536, (576,))]
)
def test_equals_the_reference(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, in_features: int, sizes: tuple[int, ...]
) -> None:
    weights = [random_matrix(n, in_features, dtype, n, in_features**-0.5) for n in sizes]
    biases = [random_matrix(1, n, dtype, n + 1)[0] if i % 2 == 0 else None for i, n in enumerate(sizes)]
    x = random_matrix(num_tokens, in_features, dtype, 3)
    expected = torch.empty(num_tokens, sum(sizes))
    reference.linear(x, reference.pack_linear(weights, biases), expected)
    for out_dtype in {dtype, torch.float32}:
        out = torch.full((num_tokens, sum(sizes)), float("nan"), dtype=out_dtype)
        kernels.linear(x, kernels.pack_linear(weights, biases), out)
        assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_result_alone_and_in_a_batch(compiled: CpuKernels, dtype: torch.dtype) -> None:
    packed = compiled.pack_linear([random_matrix(200, 576, dtype, 1)])
    x = random_matrix(133, 576, dtype, 2)
    together = torch.empty(133, 200, dtype=dtype)
    compiled.linear(x, packed, together)
    for num_rows in (1, 2, 5, 6, 7, 32):
        some = torch.empty(num_rows, 200, dtype=dtype)
        compiled.linear(x[-num_rows:], packed, some)
        assert torch.equal(some, together[-num_rows:])


def test_input_and_output_may_be_columns_of_wider_buffers(cpu: CpuKernels) -> None:
    x, out = random_matrix(5, 300, torch.bfloat16, 1), torch.zeros(5, 300, dtype=torch.bfloat16)
    packed = cpu.pack_linear([random_matrix(80, 100, torch.bfloat16, 2)])
    cpu.linear(x[:, 100:200], packed, out[:, 10:90])
    dense = torch.empty(5, 80, dtype=torch.bfloat16)
    cpu.linear(x[:, 100:200].contiguous(), packed, dense)
    assert torch.equal(out[:, 10:90], dense)
    assert not out[:, :10].any()
    assert not out[:, 90:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 33, 576])
def test_embedding_rows_are_the_weight_rows(kernels: Kernels, dtype: torch.dtype, hidden: int) -> None:
    weight = random_matrix(150, hidden, dtype, 1)
    ids = torch.tensor([149, 0, 63, 64, 65, 0, 128])
    out = torch.empty(len(ids), hidden, dtype=dtype)
    kernels.embed(ids, kernels.pack_linear([weight]), out)
    assert torch.equal(out, weight[ids])


def test_a_token_outside_the_vocabulary_is_rejected(cpu: CpuKernels) -> None:
    packed = cpu.pack_linear([random_matrix(150, 64, torch.float32, 1)])
    with pytest.raises(RuntimeError, match="row 150 is outside"):
        cpu.embed(torch.tensor([150]), packed, torch.empty(1, 64))


def test_a_weight_of_another_width_is_rejected(cpu: CpuKernels) -> None:
    packed = cpu.pack_linear([random_matrix(64, 64, torch.float32, 1)])
    with pytest.raises(RuntimeError, match="packed weight does not fit"):
        cpu.linear(torch.zeros(1, 128), packed, torch.empty(1, 64))
