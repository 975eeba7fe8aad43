"""The pool's memory: one allocation [layer, page, byte], accessed through typed views.

A page of one layer is a KV block, [keys then values, KV head, token, element], or a run of adapter tiles.
"""

import torch
from torch import Tensor

from engine.device import Device
from engine.errors import ConfigurationError
from engine.files.model_config import ModelConfig
from engine.kernels import TILE_COLUMNS, TILE_RANKS, KvCache
from engine.kernels.layout import tile_bytes


class Storage:
    """Allocated once, within `pool_bytes`; on the CPU a page uses physical memory only once it is written.

    A page is rounded up to whole tiles, so `tokens_per_page` may exceed the requested value. Raises ConfigurationError
    if the pool cannot hold a single page.
    """

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, tokens_per_page: int, pool_bytes: int, device: Device
    ) -> None:
        token_bytes = 2 * model.kv_size * dtype.itemsize
        tile = tile_bytes(dtype)
        self.tiles_per_page = -(-tokens_per_page * token_bytes // tile)
        self.page_bytes = self.tiles_per_page * tile
        self.tokens_per_page = self.page_bytes // token_bytes
        self.bytes_per_page_id = model.num_layers * self.page_bytes
        self.num_pages = pool_bytes // self.bytes_per_page_id
        if self.num_pages < 1:
            page = self.bytes_per_page_id
            raise ConfigurationError(
                f"pool_bytes is {pool_bytes}, but one page of this model takes {page} bytes; raise pool_bytes"
            )
        flat = device.zeros(self.num_pages * self.bytes_per_page_id)
        self.pool = flat.view(model.num_layers, self.num_pages, self.page_bytes)
        self.kv = KvCache(self.pool, model.num_kv_heads, model.head_dim)
        self.tiles: Tensor = self.pool.view(dtype).view(
            model.num_layers, self.num_pages, self.tiles_per_page, TILE_RANKS, TILE_COLUMNS
        )
        """[layer, page, tile in the page, 8 ranks, 64 columns]"""

    def pages_for(self, num_tiles: int) -> int:
        """Pages that hold this many tiles of each layer."""
        return -(-num_tiles // self.tiles_per_page)
