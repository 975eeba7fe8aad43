"""Drawing a token from each row of logits: a program per row, so that a row's token does not depend on the others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, Runner
from engine.kernels.triton.table import ROWS
from engine.kernels.types import Limits


@triton.jit
def count_likeliest(ordered, temperature, top_k, top_p, kept, size, BLOCK: tl.constexpr):
    """kept = how many of the top_k largest are needed, at least one, until the preceding shares reach top_p.

    ordered: fp32 [R, size], each row descending; temperature, top_p: fp64 [R]; top_k: int64 [R]; kept: int64 [R].
    Grid: (R). share_i = e^((v_i - v_0) / temperature) over their sum, in fp64 over blocks in order.
    """
    row = tl.program_id(0).to(tl.int64)
    values = ordered + row * size
    largest = tl.load(values).to(tl.float64)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    warmth = tl.load(temperature + row)
    most = tl.load(top_k + row)
    total = tl.full([], 0.0, dtype=tl.float64)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        v = tl.load(values + n, mask=n < size, other=float("-inf")).to(tl.float64)
        total += tl.sum(tl.where(n < most, tl.exp((v - largest) / warmth), 0.0), axis=0)
    limit = tl.load(top_p + row) * total
    before = tl.full([], 0.0, dtype=tl.float64)
    count = tl.full([], 0, dtype=tl.int64)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        v = tl.load(values + n, mask=n < size, other=float("-inf")).to(tl.float64)
        share = tl.where(n < most, tl.exp((v - largest) / warmth), 0.0)
        reached = before + tl.cumsum(share, axis=0) - share
        taken = (n < most) & (n < size) & ((n == 0) | (reached < limit))
        count += tl.sum(taken.to(tl.int64), axis=0)
        before += tl.sum(share, axis=0)
    tl.store(kept + row, count)


@triton.jit
def draw(logits, temperature, min_p, uniform, least, last, tokens, size, BLOCK: tl.constexpr):
    """tokens = the first id at which the cumulative weight of the kept tokens exceeds uniform times their sum.

    weight = e^((logit - largest) / temperature); kept: logits larger than `least`, or equal to it with an id up to
    `last`, of a weight of at least min_p. logits: fp32 [R, size]; temperature, min_p, uniform: fp64 [R]; least: fp32
    [R]; last, tokens: int64 [R]. Grid: (R). In fp64 over blocks in order of ids.
    """
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * size
    warmth = tl.load(temperature + row)
    share = tl.load(min_p + row)
    floor = tl.load(least + row)
    floor_id = tl.load(last + row)
    top = tl.full([], float("-inf"), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(values + n, mask=n < size, other=float("-inf")), axis=0))
    largest = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    total = tl.full([], 0.0, dtype=tl.float64)
    final = tl.full([], 0, dtype=tl.int64)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        v = tl.load(values + n, mask=n < size, other=float("-inf"))
        weight = tl.exp((v.to(tl.float64) - largest) / warmth)
        kept = (n < size) & ((v > floor) | ((v == floor) & (n <= floor_id))) & (weight >= share) & (weight > 0.0)
        total += tl.sum(tl.where(kept, weight, 0.0), axis=0)
        final = tl.maximum(final, tl.max(tl.where(kept, n, 0), axis=0).to(tl.int64))
    target = tl.load(uniform + row) * total
    before = tl.full([], 0.0, dtype=tl.float64)
    count = tl.full([], 0, dtype=tl.int64)
    for first in range(0, size, BLOCK):
        n = first + tl.arange(0, BLOCK)
        v = tl.load(values + n, mask=n < size, other=float("-inf"))
        weight = tl.exp((v.to(tl.float64) - largest) / warmth)
        kept = (n < size) & ((v > floor) | ((v == floor) & (n <= floor_id))) & (weight >= share) & (weight > 0.0)
        weight = tl.where(kept, weight, 0.0)
        passed = before + tl.cumsum(weight, axis=0) <= target
        count += tl.sum((passed & (n < size)).to(tl.int64), axis=0)
        before += tl.sum(weight, axis=0)
    tl.store(tokens + row, tl.minimum(count, final))


class Drawing:
    """Launches the kernels of this module; torch does the sorting, which is exact."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    def draw(self, logits: Tensor, limits: Limits) -> Tensor:
        """See `Kernels.draw`."""
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        count, size = logits.shape
        least = torch.full((count,), float("-inf"), device=logits.device)
        last = torch.full((count,), size, dtype=torch.int64, device=logits.device)
        if len(limits.restricted):
            self._restrict(logits, limits, least, last)
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        arguments = (logits, limits.temperature, limits.min_p, limits.uniform, least, last, tokens, size)
        self._launch(draw, count, arguments)
        return tokens

    def _restrict(self, logits: Tensor, limits: Limits, least: Tensor, last: Tensor) -> None:
        """Set the smallest logit that each restricted row keeps, and the last id with that logit that it keeps."""
        rows = limits.restricted
        ordered, order = torch.index_select(logits, 0, rows).sort(dim=-1, descending=True, stable=True)
        kept = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        temperature = torch.index_select(limits.temperature, 0, rows)
        arguments = (ordered, temperature, limits.top_k, limits.top_p, kept, logits.shape[1])
        self._launch(count_likeliest, len(rows), arguments)
        place = (kept - 1)[:, None]
        least.index_copy_(0, rows, ordered.gather(1, place)[:, 0])
        last.index_copy_(0, rows, order.gather(1, place)[:, 0])

    def _launch(self, kernel: object, count: int, arguments: tuple[Tensor | int, ...]) -> None:
        blocks = ROWS["draw"]
        self._run(Launch(kernel, (count,), arguments, {"BLOCK": blocks.block}, blocks.num_warps, 1))
