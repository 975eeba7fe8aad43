"""The project's only error metric and its tolerance per dtype, for tests and GPU checks."""

import torch
from torch import Tensor

# A result is computed in float32 and rounded once: half a unit in the last place is 2^-9 in bf16 and 2^-12 in fp16.
# Twice that allows for float32 sums in a different order, which are the only error in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest |actual - expected| / (|expected| + rms of its row); infinite for NaN and for errors in all-zero rows."""
    if actual.numel() == 0:
        return 0.0
    expected = expected.float().flatten(1)
    difference = (actual.float().flatten(1) - expected).abs()
    size = expected.abs() + expected.square().mean(dim=1, keepdim=True).sqrt()
    ratio = torch.where(difference == 0, 0.0, difference / size)
    return float(ratio.nan_to_num(nan=float("inf")).max())
