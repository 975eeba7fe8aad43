"""Drawing a token from logits in float64: the reference, also used by backends without a kernel for it."""

import torch
from torch import Tensor

from engine.kernels.types import Limits


def draw(logits: Tensor, limits: Limits) -> Tensor:
    """See `Kernels.draw`: inverse of the cumulative distribution, in order of token ids."""
    exact = logits.double()
    exact = exact - exact.amax(dim=-1, keepdim=True)  # keeps the most likely token at 0 for the smallest temperature
    scaled = exact / limits.temperature[:, None]
    if len(limits.restricted):
        scaled[limits.restricted] = _restrict(scaled[limits.restricted], limits.top_k, limits.top_p)
    probabilities = torch.softmax(scaled, dim=-1)
    least = limits.min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    cumulative = probabilities.masked_fill(probabilities < least, 0.0).cumsum(dim=-1)
    target = limits.uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k most likely tokens, and of these the fewest whose share reaches top_p; the rest become -inf."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    ordered.masked_fill_(ranks >= top_k[:, None], -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    cut = probabilities.cumsum(dim=-1) - probabilities >= top_p[:, None]
    cut[:, 0] = False
    ordered.masked_fill_(cut, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
