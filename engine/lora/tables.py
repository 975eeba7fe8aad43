"""The slot tables in which the kernels look up adapters: one row for each registered adapter."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import PROJECTIONS, LoraTables
from engine.lora.layout import AdapterLayout, Table
from engine.memory.storage import Storage
from engine.types import PageId

INITIAL_SLOTS = 1024
INITIAL_PAGES = 1024
"""Initial pages per slot, at most the pool's; tables that grow later invalidate every recorded step."""
MIN_RANK_BOUND = 64

Array = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class SlotTables:
    """Rows are written when an adapter is registered or loaded into pages; the tables grow by doubling.

    `layers` has the projections of each layer, `edges` the embedding and the head (see engine.lora.layout). If the
    kernels read host memory, these are the arrays themselves. Otherwise they are a copy on the device, and `changes`
    returns the rows that the next step must update. `generation` increases whenever the tensors are reallocated.
    """

    layers: LoraTables
    edges: LoraTables

    def __init__(self, storage: Storage, *, is_remote: bool = False) -> None:
        self._storage, self._is_remote = storage, is_remote
        num_layers = len(storage.pool)
        self.pages = np.zeros((INITIAL_SLOTS, min(INITIAL_PAGES, storage.num_pages)), np.int32)
        self._layers, self._edges = (_stacked(INITIAL_SLOTS, num_layers) for _ in range(2))
        self._free = list(reversed(range(INITIAL_SLOTS)))
        self._changed: dict[int, None] = {}
        self.generation = 0
        self._bounds = [MIN_RANK_BOUND, MIN_RANK_BOUND]
        self._wrap()

    def _wrap(self) -> None:
        """Recreate the kernels' tensors from the arrays, on the CPU without a copy."""
        pages, pool = self._tensor(self.pages), self._storage.pool
        self.layers, self.edges = (
            LoraTables(pool, pages, self._tensor(table.parts), self._tensor(table.scales), bound)
            for table, bound in zip((self._layers, self._edges), self._bounds, strict=True)
        )
        self._changed.clear()

    def _tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._storage.pool.device, copy=True) if self._is_remote else tensor

    def add(self, layout: AdapterLayout) -> int:
        """Assign a slot to an adapter."""
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
        """Pass the current rank bounds to the kernels."""
        layers, edges = self.layers, self.edges
        self.layers, self.edges = (
            LoraTables(old.pool, old.adapter_pages, old.parts, old.scales, bound)
            for old, bound in zip((layers, edges), self._bounds, strict=True)
        )

    def set_pages(self, slot: int, pages: Sequence[PageId]) -> None:
        """Set the pages of a slot's adapter."""
        if len(pages) > self.pages.shape[1]:
            self._grow(len(self.pages), 1 << (len(pages) - 1).bit_length())
        self.pages[slot, : len(pages)] = pages
        self._changed[slot] = None

    def remove(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def changes(self) -> Iterator[tuple[torch.Tensor, Array]]:
        """Yield (row of a table on the device, its new value) for everything written since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        for slot in changed:
            yield self.layers.adapter_pages[slot], self.pages[slot]
            for tensors, arrays in ((self.layers, self._layers), (self.edges, self._edges)):
                yield tensors.parts[slot], arrays.parts[slot]
                yield tensors.scales[slot], arrays.scales[slot]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All tables in host memory, one row per slot; their size bounds how much `changes` returns for one step."""
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
