"""The slot tables that the kernels look adapters up in: one row for each loaded adapter."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import PROJECTIONS, LoraTables
from engine.lora.layout import AdapterLayout, Table
from engine.memory.storage import Storage
from engine.types import PageId

FIRST_SLOTS = 1024
FIRST_PAGES = 1024
"""Of a slot, or all that the pool has: tables that grow later end every recorded step."""
LEAST_RANK_BOUND = 64

Array = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class SlotTables:
    """Rows are written when an adapter is loaded or comes back into the pool; they grow by doubling.

    `layers` are the projections of every layer, `edges` what belongs to no layer (see engine.lora.layout). Where the
    operators read host memory, these are the arrays themselves. Otherwise they are a copy on the device, and `changes`
    says which rows of it the next step must bring up to date. `generation` goes up when the tensors are new ones.
    """

    layers: LoraTables
    edges: LoraTables

    def __init__(self, storage: Storage, *, is_remote: bool = False) -> None:
        self._storage, self._is_remote = storage, is_remote
        num_layers = len(storage.pool)
        self.pages = np.zeros((FIRST_SLOTS, min(FIRST_PAGES, storage.num_pages)), np.int32)
        self._layers, self._edges = (_stacked(FIRST_SLOTS, num_layers) for _ in range(2))
        self._free = list(reversed(range(FIRST_SLOTS)))
        self._changed: dict[int, None] = {}
        self.generation = 0
        self._bounds = [LEAST_RANK_BOUND, LEAST_RANK_BOUND]
        self._wrap()

    def _wrap(self) -> None:
        """Give the kernels the arrays as tensors, on the CPU without a copy."""
        pages, pool = self._tensor(self.pages), self._storage.pool
        self.layers, self.edges = (
            LoraTables(pool, pages, self._tensor(table.parts), self._tensor(table.scales), bound)
            for table, bound in zip((self._layers, self._edges), self._bounds, strict=True)
        )
        self._changed.clear()

    def _tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._storage.pool.device, copy=True) if self._is_remote else tensor

    def open(self, layout: AdapterLayout) -> int:
        """A slot for an adapter."""
        if not self._free:
            self._grow(2 * len(self.pages), self.pages.shape[1])
        slot = self._free.pop()
        for index, (table, own) in enumerate(((self._layers, layout.layers), (self._edges, layout.edges))):
            table.parts[slot], table.scales[slot] = own.parts, own.scales
            largest = max(int(own.parts[..., 1].max()), self._bounds[index])
            self._bounds[index] = 1 << (largest - 1).bit_length()
        self._changed[slot] = None
        self._bound()
        return slot

    def _bound(self) -> None:
        """Tell the kernels of a larger rank."""
        layers, edges = self.layers, self.edges
        self.layers, self.edges = (
            LoraTables(old.pool, old.adapter_pages, old.parts, old.scales, bound)
            for old, bound in zip((layers, edges), self._bounds, strict=True)
        )

    def place(self, slot: int, pages: Sequence[PageId]) -> None:
        """The adapter lies in these pages now."""
        if len(pages) > self.pages.shape[1]:
            self._grow(len(self.pages), 1 << (len(pages) - 1).bit_length())
        self.pages[slot, : len(pages)] = pages
        self._changed[slot] = None

    def close(self, slot: int) -> None:
        """The slot's adapter is unloaded."""
        self._free.append(slot)

    def changes(self) -> Iterator[tuple[torch.Tensor, Array]]:
        """(row of a table on the device, what it must become) of all that was written since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        for slot in changed:
            yield self.layers.adapter_pages[slot], self.pages[slot]
            for there, here in ((self.layers, self._layers), (self.edges, self._edges)):
                yield there.parts[slot], here.parts[slot]
                yield there.scales[slot], here.scales[slot]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All tables in host memory, a row for each slot: a step sends at most as much of them as `changes`."""
        return (self.pages, self._layers.parts, self._layers.scales, self._edges.parts, self._edges.scales)

    def _grow(self, num_slots: int, num_pages: int) -> None:
        old = len(self.pages)
        self.pages = np.pad(self.pages, ((0, num_slots - old), (0, num_pages - self.pages.shape[1])))
        for table in (self._layers, self._edges):
            table.parts = np.pad(table.parts, ((0, num_slots - old), (0, 0), (0, 0), (0, 0)))
            table.scales = np.pad(table.scales, ((0, num_slots - old), (0, 0), (0, 0)))
        self._free.extend(reversed(range(old, num_slots)))
        self._wrap()
        self.generation += 1


def _stacked(num_slots: int, num_layers: int) -> Table:
    projections = len(PROJECTIONS)
    return Table(
        np.zeros((num_slots, num_layers, projections, 2), np.int32),
        np.zeros((num_slots, num_layers, projections), np.float32),
    )
