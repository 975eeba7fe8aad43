"""Keys and values in pages: where a token's are written and where a sequence's are read."""

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ConfigurationError
from engine.model.config import ModelConfig

Ints = npt.NDArray[np.int64]


def bytes_per_page(model: ModelConfig, tokens_per_page: int, itemsize: int) -> int:
    """Bytes of one page id over all layers: keys and values of `tokens_per_page` tokens."""
    return model.num_layers * 2 * model.kv_size * tokens_per_page * itemsize


def num_pages(model: ModelConfig, tokens_per_page: int, itemsize: int, kv_bytes: int, max_sequences: int) -> int:
    """Pages within `kv_bytes`, at most as many as `max_sequences` full contexts could use."""
    page = bytes_per_page(model, tokens_per_page, itemsize)
    if kv_bytes < page:
        raise ConfigurationError(f"kv_bytes is {kv_bytes}, but one page of this model takes {page} bytes; raise it")
    return min(kv_bytes // page, max_sequences * -(-model.max_position // tokens_per_page))


class KvCache:
    """One block [layer, page, keys then values of each KV head, token, element].

    A page id names that page in every layer, and a head's keys in a page are one row of `tokens_per_page · head_dim`
    elements, so that reading a sequence is one gather of whole rows.
    """

    def __init__(
        self, model: ModelConfig, pages: int, tokens_per_page: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_kv_heads, self._head_dim = model.num_kv_heads, model.head_dim
        self.tokens_per_page = tokens_per_page
        shape = (model.num_layers, pages, 2 * model.num_kv_heads, tokens_per_page, model.head_dim)
        self._data = torch.empty(shape, dtype=dtype, device=device)

    def clear(self, pages: list[int]) -> None:
        """Zero pages, so that slots not yet written hold no other sequence's values."""
        if pages:
            self._data[:, pages] = 0

    def write_index(self, pages: Ints, slots: Ints) -> torch.Tensor:
        """Index for `write` of tokens that lie in slot `slots[i]` of page `pages[i]`."""
        heads = np.arange(2 * self._num_kv_heads)
        rows = (pages[:, None] * 2 * self._num_kv_heads + heads) * self.tokens_per_page + slots[:, None]
        return torch.from_numpy(rows.reshape(-1)).to(self._data.device)

    def read_index(self, pages: Ints) -> torch.Tensor:
        """Index for `read` of sequences whose pages are `pages` (sequences, pages)."""
        heads = np.arange(self._num_kv_heads)[None, :, None]
        keys = pages[:, None, :] * 2 * self._num_kv_heads + heads
        return torch.from_numpy(np.stack((keys, keys + self._num_kv_heads)).reshape(-1)).to(self._data.device)

    def write(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """Store keys and values, kv (tokens, 2 · kv_heads · head_dim)."""
        self._data[layer].view(-1, self._head_dim).index_copy_(0, index, kv.reshape(-1, self._head_dim))

    def read(self, layer: int, index: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of sequences, each (sequences, kv_heads, tokens, head_dim)."""
        rows = self._data[layer].view(-1, self.tokens_per_page * self._head_dim)
        gathered = rows.index_select(0, index).view(2, num_sequences, self._num_kv_heads, -1, self._head_dim)
        return gathered[0], gathered[1]
