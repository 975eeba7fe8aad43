"""The slot tables that the kernels look adapters up in: one row for each loaded adapter, in memory once."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels import PROJECTIONS, LoraTables
from engine.lora.layout import AdapterLayout, Table
from engine.memory.storage import Storage
from engine.types import PageId

FIRST_SLOTS = 64


class SlotTables:
    """Rows are written when an adapter is loaded or comes back into the pool; they grow by doubling, never in a step.

    `layers` are the projections of every layer, `edges` what belongs to no layer (see engine.lora.layout).
    """

    layers: LoraTables
    edges: LoraTables

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        num_layers = len(storage.pool)
        self.pages = np.zeros((FIRST_SLOTS, 1), np.int32)
        self._layers, self._edges = (_stacked(FIRST_SLOTS, num_layers) for _ in range(2))
        self._free = list(reversed(range(FIRST_SLOTS)))
        self._wrap()

    def _wrap(self) -> None:
        """Give the kernels the arrays as tensors, without a copy."""
        pages, pool = torch.from_numpy(self.pages), self._storage.pool
        self.layers, self.edges = (
            LoraTables(pool, pages, torch.from_numpy(table.parts), torch.from_numpy(table.scales))
            for table in (self._layers, self._edges)
        )

    def open(self, layout: AdapterLayout) -> int:
        """A slot for an adapter."""
        if not self._free:
            self._grow(2 * len(self.pages), self.pages.shape[1])
        slot = self._free.pop()
        for table, own in ((self._layers, layout.layers), (self._edges, layout.edges)):
            table.parts[slot], table.scales[slot] = own.parts, own.scales
        return slot

    def place(self, slot: int, pages: Sequence[PageId]) -> None:
        """The adapter lies in these pages now."""
        if len(pages) > self.pages.shape[1]:
            self._grow(len(self.pages), len(pages))
        self.pages[slot, : len(pages)] = pages

    def close(self, slot: int) -> None:
        """The slot's adapter is unloaded."""
        self._free.append(slot)

    def _grow(self, num_slots: int, num_pages: int) -> None:
        old = len(self.pages)
        self.pages = np.pad(self.pages, ((0, num_slots - old), (0, num_pages - self.pages.shape[1])))
        for table in (self._layers, self._edges):
            table.parts = np.pad(table.parts, ((0, num_slots - old), (0, 0), (0, 0), (0, 0)))
            table.scales = np.pad(table.scales, ((0, num_slots - old), (0, 0), (0, 0)))
        self._free.extend(reversed(range(old, num_slots)))
        self._wrap()


def _stacked(num_slots: int, num_layers: int) -> Table:
    projections = len(PROJECTIONS)
    return Table(
        np.zeros((num_slots, num_layers, projections, 2), np.int32),
        np.zeros((num_slots, num_layers, projections), np.float32),
    )
