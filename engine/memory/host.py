"""The host tier: adapters in page layout, in memory that the device copies from; least recently used out first."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.device import Device
from engine.errors import ConfigurationError
from engine.kernels import TILE_COLUMNS, TILE_RANKS
from engine.memory.pool import AdapterPages, PagePool
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.types import AdapterName, PageId


class HostTier:
    """`images[page]` is what one page id of the device's pool is to hold, of all layers: uint8 [pages, layers, bytes].

    Raises ConfigurationError when `num_bytes` would not hold a single page.
    """

    def __init__(self, storage: Storage, device: Device, num_bytes: int) -> None:
        page = storage.bytes_per_page_id
        num_pages = num_bytes // page
        if num_pages < 1:
            raise ConfigurationError(f"host_bytes is {num_bytes}, but one page of this model takes {page}; raise it")
        layers = len(storage.pool)
        self.num_pages, self.bytes_per_page_id = num_pages, page
        self.images = device.host(num_pages * page).view(num_pages, layers, storage.page_bytes)
        shape = (num_pages, layers, storage.tiles_per_page, TILE_RANKS, TILE_COLUMNS)
        self.tiles: Tensor = self.images.view(storage.tiles.dtype).view(shape).transpose(0, 1)
        """The same as `Storage.tiles`: [layer, page, tile in the page, 8 ranks, 64 columns]"""
        self._pool = PagePool(num_pages)
        self._residency = Residency(self._pool)

    def __contains__(self, name: AdapterName) -> bool:
        return AdapterPages(name) in self._residency

    def pages_of(self, name: AdapterName) -> Sequence[PageId]:
        """Where an adapter of the tier lies."""
        return self._pool.pages_of(AdapterPages(name))

    def take(self, name: AdapterName, num_pages: int) -> bool:
        """Make room for an adapter and hold it; False, and nothing changes, when others hold too much."""
        if num_pages > self._residency.num_available:
            return False
        self._residency.take(AdapterPages(name), num_pages)
        self._residency.admit(AdapterPages(name))
        return True

    def hold(self, name: AdapterName) -> None:
        """It stays until it is let go."""
        self._residency.hold(AdapterPages(name))

    def let_go(self, name: AdapterName) -> None:
        """It may give way to others from now on."""
        self._residency.let_go(AdapterPages(name))

    def forget(self, name: AdapterName) -> None:
        """Give an adapter's memory back, if it is there."""
        self._residency.forget(AdapterPages(name))


def page_ids(pages: Sequence[PageId]) -> Tensor:
    """As an index."""
    return torch.tensor(list(pages), dtype=torch.int64)
