"""The exact work list of a step, built on the device: which rows each program of a kernel processes.

    items of segment s = its rows in blocks of BLOCK_M;   item = (owner, first row, end)

A list's capacity depends only on the number of rows and segments, so a grid over it does not change with the mix.
A list may be restricted to segments of certain lengths: two lists divide a step between two kinds of blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, Runner, version

ITEM_VALUES = 4
SCAN = 128


class Lengths(NamedTuple):
    """Segments of `fewest` to `most` rows."""

    fewest: int
    most: int


MAX_ROWS = 2**31 - 1
ANY, ONE, SEVERAL = Lengths(1, MAX_ROWS), Lengths(1, 1), Lengths(2, MAX_ROWS)


@triton.jit(do_not_specialize=["num_segments", "capacity", "fewest", "most"])
def list_items(
    bounds,
    owners,
    items,
    num_segments,
    capacity,
    fewest,
    most,
    BLOCK_M: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """items[i] = (owner, first row, end, 0) of every block of every segment, in order; owner -1 after the last.

    bounds: int32 [S + 1]; owners: int32 [S] or none (each segment is its own owner); items: int32 [capacity, 4].
    Grid: (S + 1), a program per segment and one for the remaining capacity. Integers only. A segment without
    `fewest` (at least 1) to `most` rows, or with a negative owner, has no item.
    """
    segment = tl.program_id(0)
    before = 0
    for first in range(0, segment, SCAN):
        s = first + tl.arange(0, SCAN)
        earlier = s < segment
        rows = tl.load(bounds + s + 1, mask=earlier, other=0) - tl.load(bounds + s, mask=earlier, other=0)
        blocks = tl.where((rows >= fewest) & (rows <= most), (rows + BLOCK_M - 1) // BLOCK_M, 0)
        if HAS_OWNERS:
            blocks = tl.where(tl.load(owners + s, mask=earlier, other=-1) >= 0, blocks, 0)
        before += tl.sum(blocks)
    owner = -1
    start = 0
    end = 0
    count = capacity - before
    if segment < num_segments:
        owner = segment
        if HAS_OWNERS:
            owner = tl.load(owners + segment)
        start = tl.load(bounds + segment)
        end = tl.load(bounds + segment + 1)
        count = (end - start + BLOCK_M - 1) // BLOCK_M
        if (owner < 0) | (end - start < fewest) | (end - start > most):
            count = 0
    for first in range(0, count, SCAN):
        i = first + tl.arange(0, SCAN)
        mine = (i < count) & (before + i < capacity)
        row = items + (before + i).to(tl.int64) * 4
        tl.store(row, tl.zeros_like(i) + owner, mask=mine)
        tl.store(row + 1, start + i * BLOCK_M, mask=mine)
        tl.store(row + 2, tl.minimum(start + (i + 1) * BLOCK_M, end), mask=mine)


@dataclass(frozen=True)
class WorkList:
    """int32 [capacity, 4] items; those after the last have owner -1."""

    items: Tensor
    capacity: int


def list_work(
    run: Runner, bounds: Tensor, owners: Tensor | None, num_rows: int, block_m: int, lengths: Lengths = ANY
) -> WorkList:
    """Cut segments of these lengths into blocks of `block_m` rows; one launch."""
    num_segments = len(bounds) - 1
    assert bounds.dtype == torch.int32
    assert bounds.is_contiguous()
    assert owners is None or (owners.dtype == torch.int32 and owners.is_contiguous() and len(owners) == num_segments)
    assert lengths.fewest > 0
    capacity = min(num_rows, num_rows // block_m + num_segments, num_segments * -(-lengths.most // block_m))
    items = torch.empty(max(capacity, 1), ITEM_VALUES, dtype=torch.int32, device=bounds.device)
    constants = {"BLOCK_M": block_m, "HAS_OWNERS": owners is not None, "SCAN": SCAN}
    arguments = (bounds, owners, items, num_segments, capacity, *lengths)
    run(Launch(list_items, (num_segments + 1,), arguments, constants, num_warps=1, num_stages=1))
    return WorkList(items, capacity)


class Plans:
    """The work lists of the current step: all layers share them, so each is built once.

    A step is identified by its tensors and their versions; code that writes them outside torch must pass new tensors.
    """

    def __init__(self, run: Runner) -> None:
        self._run = run
        self._step: tuple[tuple[Tensor, int], ...] = ()
        self._lists: dict[tuple[int, int, Lengths], WorkList] = {}

    def forget(self) -> None:
        """Rebuild the next list even for the same tensors: a recorded step must contain the launches that build it."""
        self._step, self._lists = (), {}

    def get(
        self, bounds: Tensor, owners: Tensor | None, num_rows: int, block_m: int, lengths: Lengths = ANY
    ) -> WorkList:
        """The list for these segments, this block size and these lengths."""
        step = tuple((t, version(t)) for t in (bounds, owners) if t is not None)
        same = len(step) == len(self._step) and all(
            a is b and v == w for (a, v), (b, w) in zip(step, self._step, strict=True)
        )
        if not same:
            self._step, self._lists = step, {}
        key = (num_rows, block_m, lengths)
        if key not in self._lists:
            self._lists[key] = list_work(self._run, bounds, owners, num_rows, block_m, lengths)
        return self._lists[key]
