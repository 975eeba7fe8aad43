"""LoRA on the model's edges, the embedding and the head, computed stripe by stripe with the layers' kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import TILE_COLUMNS, TILE_RANKS, Kernels, LoraBatch, LoraTables
from engine.kernels.layout import column_tiles
from engine.lora.layout import EMBEDDING_EXPANSION, EMBEDDING_STRIPE, HEAD_STRIPE, Stripes
from engine.memory.storage import Storage


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Tokens `start` to `end` of the step use a slot's adapter, which adapts the embedding."""

    start: int
    end: int
    slot: int
    rank: int


@dataclass(frozen=True, slots=True)
class EdgeBatch:
    """A step's rows whose adapters adapt the embedding (by token) or the head (by sampled row)."""

    embedding: tuple[EmbeddingRows, ...]
    head: LoraBatch | None


class Edges:
    """Applies LoRA to the embedding and the head. Not used in steps without such adapters."""

    def __init__(self, kernels: Kernels, storage: Storage, stripes: Stripes) -> None:
        self._kernels, self._storage, self._stripes = kernels, storage, stripes
        sizes = [columns.stop - columns.start for _, columns in stripes]
        self._tiles_across = torch.tensor([column_tiles(size) for size in sizes], device=storage.pool.device)

    def add_head(self, logits: Tensor, x: Tensor, head: LoraBatch) -> None:
        """logits [rows, vocabulary] += s (x A^T) B in place, one stripe of columns at a time."""
        for layer, columns in self._stripes:
            width = columns.stop - columns.start
            self._kernels.lora_apply(logits[:, columns], x, (width,), head, layer, HEAD_STRIPE)

    def add_embedding(self, x: Tensor, token_ids: Tensor, rows: EmbeddingRows, tables: LoraTables) -> None:
        """x [tokens, hidden] += s B A[:, token] for the rows of one adapter, in place."""
        h = self._columns_of_a(token_ids[rows.start : rows.end], rows, tables)
        count, device = rows.end - rows.start, x.device
        segments = torch.arange(0, count + 1, count, dtype=torch.int32, device=device)
        batch = LoraBatch(tables, segments, torch.full((1,), rows.slot, dtype=torch.int32, device=device))
        part = x[rows.start : rows.end]
        self._kernels.lora_apply(part, h, (part.shape[1],), batch, 0, EMBEDDING_EXPANSION)

    def _columns_of_a(self, ids: Tensor, rows: EmbeddingRows, tables: LoraTables) -> Tensor:
        """A[:, token] of each token, [tokens, padded rank]: a lookup, as in the embedding itself."""
        layer, column = ids // self._stripes.width, ids % self._stripes.width
        groups = torch.arange(rows.rank // TILE_RANKS, device=ids.device)
        first = tables.parts[rows.slot, layer, EMBEDDING_STRIPE, 0] + column // TILE_COLUMNS
        tile = first[:, None] + groups * self._tiles_across[layer][:, None]
        page = tables.adapter_pages[rows.slot][tile // self._storage.tiles_per_page].long()
        within, place = tile % self._storage.tiles_per_page, (column % TILE_COLUMNS)[:, None]
        return self._storage.tiles[layer[:, None], page, within, :, place].flatten(1)
