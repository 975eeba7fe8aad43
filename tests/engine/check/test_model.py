"""The random model is created in its final dtype."""

from pathlib import Path

import pytest
import torch

from engine.check.model import default_dtype, random_model
from engine.kernels.triton.measure.shapes import ModelShape


def test_weights_are_bf16_from_the_start_and_rotation_stays_in_float32(tmp_path: Path) -> None:
    shape = ModelShape("tiny", 1, 32, 2, 1, 16, 48, 64)
    model = random_model(tmp_path, shape, torch.bfloat16, torch.device("cpu"), 32)
    assert {weight.dtype for weight in model.weights.values()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.peer.buffers()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_the_default_dtype_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), default_dtype(torch.bfloat16):
        raise RuntimeError
    assert torch.get_default_dtype() == torch.float32
