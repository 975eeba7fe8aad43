"""Drawing against the float64 reference; a row's token does not depend on the other rows."""

import pytest
import torch
from torch import Tensor

from engine.kernels import Limits
from engine.kernels import drawing as reference
from tests.engine.kernels.cases import random_matrix
from tests.engine.kernels.triton.grid.device import FP32, OnDevice, grid

ROWS = 8


def limits_for(rows: list[int]) -> Limits:
    """Every row has its own random number and parameters; every second one is restricted."""
    restricted = [index for index, row in enumerate(rows) if row % 2]
    floats = {"dtype": torch.float64}
    return Limits(
        temperature=torch.tensor([(0.3, 1.0, 5.0, 1e-4)[row % 4] for row in rows], **floats),
        min_p=torch.tensor([(0.0, 0.05)[row % 3 == 0] for row in rows], **floats),
        uniform=torch.tensor([(row * 0.6180339) % 1 for row in rows], **floats),
        restricted=torch.tensor(restricted, dtype=torch.int64),
        top_k=torch.tensor([(5, 10**6, 1, 20)[rows[index] // 2 % 4] for index in restricted], dtype=torch.int64),
        top_p=torch.tensor([(1.0, 0.8, 0.5, 1e-9)[rows[index] // 2 % 4] for index in restricted], **floats),
    )


def logits(size: int) -> Tensor:
    values = random_matrix(ROWS, size, FP32, 5, 3.0)
    values[3] = values[3].round()  # many ties
    values[5, 1::2] = float("-inf")
    return values


@pytest.mark.parametrize("size", grid([1, 100, 3000], [1, 7, 100, 3000, 49152]))
def test_tokens_equal_the_reference_alone_and_in_a_batch(kernels: OnDevice, size: int) -> None:
    values, rows = logits(size), list(range(ROWS))
    together = kernels.draw(values, limits_for(rows)).cpu()
    assert torch.equal(together, reference.draw(values, limits_for(rows)))
    for row in (1, 4, 7):
        alone = kernels.draw(values[row : row + 1].contiguous(), limits_for([row])).cpu()
        assert torch.equal(alone, together[row : row + 1])


def test_extreme_parameters_still_return_a_valid_token(kernels: OnDevice) -> None:
    values = logits(100)
    limits = limits_for(list(range(ROWS)))
    limits.temperature.fill_(1e-300)
    tokens = kernels.draw(values, limits).cpu()
    assert torch.equal(tokens[[0, 1, 2, 4]], values.argmax(-1)[[0, 1, 2, 4]])
    limits = limits_for(list(range(ROWS)))
    limits.uniform.fill_(1 - 2.0**-52)
    tokens = kernels.draw(values, limits).cpu()
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert torch.isfinite(values.gather(1, tokens[:, None])).all()
