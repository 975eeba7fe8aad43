"""The host tier: an LRU cache of adapters in page layout, in host memory that the device copies from."""

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
    """`images[page]` is the content of one page of the device's pool in all layers: uint8 [pages, layers, bytes].

    Raises ConfigurationError if `num_bytes` cannot hold a single page.
    """

    def __init__(self, storage: Storage, device: Device, num_bytes: int) -> None:
        page = storage.bytes_per_page_id
        num_pages = num_bytes // page
        if num_pages < 1:
            raise ConfigurationError(
                f"host_bytes is {num_bytes}, but one page of this model takes {page} bytes; raise host_bytes"
            )
        layers = len(storage.pool)
        self.num_pages, self.bytes_per_page_id = num_pages, page
        self.images = device.host(num_pages * page).view(num_pages, layers, storage.page_bytes)
        shape = (num_pages, layers, storage.tiles_per_page, TILE_RANKS, TILE_COLUMNS)
        self.tiles: Tensor = self.images.view(storage.tiles.dtype).view(shape).transpose(0, 1)
        """The same layout as `Storage.tiles`: [layer, page, tile in the page, 8 ranks, 64 columns]"""
        self._pool = PagePool(num_pages)
        self._residency = Residency(self._pool)

    def __contains__(self, name: AdapterName) -> bool:
        return AdapterPages(name) in self._residency

    def pages_of(self, name: AdapterName) -> Sequence[PageId]:
        """The pages of an adapter in the tier."""
        return self._pool.pages_of(AdapterPages(name))

    def try_allocate(self, name: AdapterName, num_pages: int) -> bool:
        """Allocate pages for an adapter and acquire it; False, without changes, if adapters in use leave no room."""
        if num_pages > self._residency.num_available:
            return False
        self._residency.allocate(AdapterPages(name), num_pages)
        self._residency.admit(AdapterPages(name))
        return True

    def acquire(self, name: AdapterName) -> None:
        """Keep an adapter in the tier until it is released."""
        self._residency.acquire(AdapterPages(name))

    def release(self, name: AdapterName) -> None:
        """Allow an adapter to be evicted."""
        self._residency.release(AdapterPages(name))

    def discard(self, name: AdapterName) -> None:
        """Free an adapter's pages, if it is in the tier."""
        self._residency.discard(AdapterPages(name))


def page_ids(pages: Sequence[PageId]) -> Tensor:
    """Page ids as an index tensor."""
    return torch.tensor(list(pages), dtype=torch.int64)
