"""The CUDA backend sets the precision of torch's products, which it uses for the base weights."""

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.triton import TritonKernels


@pytest.fixture
def _loose() -> Iterator[None]:
    """Imprecise settings, as a host program may have left them."""
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
