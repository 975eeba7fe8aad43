"""torch's own products, which the CUDA backend takes for the base weights, are told how exact they must be."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.triton import TritonKernels


@pytest.fixture
def _loose() -> Iterator[None]:
    """As a host program may have left the settings."""
    matmul = torch.backends.cuda.matmul
    before = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.set_float32_matmul_precision("medium")
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    yield
    torch.set_float32_matmul_precision(before[0])
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before[1:]


@pytest.mark.usefixtures("_loose")
def test_products_are_neither_tf32_nor_added_in_16_bits() -> None:
    TritonKernels()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction is False
