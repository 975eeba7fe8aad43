"""The layout of an adapter as tiles in pages, and the copy from its file into that layout.

In each layer an adapter is one stream of tiles: A, then B transposed, of each adapted projection, each at its own rank
rounded up to a multiple of eight. LoRA on the head and the embedding is split into vocabulary stripes, one appended to
each layer's stream. A stripe of the head has A and its columns of B, a stripe of the embedding its columns of A. The
embedding's B is in layer 0, with an identity matrix in the place of A, so that the same kernel expands a column of A.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.files.tensorfile import Bytes, StoredTensor, map_file
from engine.kernels import PROJECTIONS, TILE_COLUMNS, TILE_RANKS
from engine.kernels.layout import column_tiles, padded_rank, tiles_of
from engine.lora.peft import LoraModule, PeftAdapter
from engine.types import PageId

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Columns of the tables for embedding and head, which have the same shape as the layers' tables.
HEAD_STRIPE, EMBEDDING_STRIPE, EMBEDDING_EXPANSION = range(3)

ORDER = {f"{name}_proj": index for index, name in enumerate(PROJECTIONS)}


def to_tensor(stored: StoredTensor, file: Bytes | None = None) -> Tensor:
    """A stored tensor, mapped from its file without a copy; `file` is an existing mapping of it."""
    bits = stored.bits(file)
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(TORCH_DTYPES[stored.dtype])


@dataclass(frozen=True, slots=True)
class Stripes:
    """The vocabulary split into runs of whole tiles, one per layer; the last run may be shorter, and some are empty."""

    vocabulary: int
    width: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Stripes":
        """Stripes as equal as whole tiles allow."""
        return cls(model.vocab_size, -(-column_tiles(model.vocab_size) // model.num_layers) * int(TILE_COLUMNS))

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield (layer, token ids) of every non-empty stripe."""
        for layer, start in enumerate(range(0, self.vocabulary, self.width)):
            yield layer, slice(start, min(start + self.width, self.vocabulary))


@dataclass(frozen=True, slots=True)
class Piece:
    """One [rank, columns] matrix of a stream: columns of a stored tensor, transposed if `transposed` is set.

    Without a stored tensor it is the identity.
    """

    first_tile: int
    num_tiles: int
    rank: int
    columns: slice
    stored: StoredTensor | None
    transposed: bool

    def matrix(self, file: Bytes) -> Tensor:
        """The matrix as a view of the mapped file."""
        if self.stored is None:
            return torch.eye(self.rank)
        tensor = to_tensor(self.stored, file)
        return (tensor.T if self.transposed else tensor)[:, self.columns]


@dataclass(slots=True)
class Table:
    """One adapter's rows of the kernels' tables: (first tile, padded rank) and scale by layer and projection."""

    parts: Ints
    scales: Floats

    @classmethod
    def empty(cls, num_layers: int) -> "Table":
        """A table of an adapter that adapts nothing."""
        projections = len(PROJECTIONS)
        return cls(np.zeros((num_layers, projections, 2), np.int32), np.zeros((num_layers, projections), np.float32))

    def set(self, layer: int, projection: int, first_tile: int, module: LoraModule) -> None:
        """Set the first tile of a module's A; B follows it."""
        self.parts[layer, projection] = first_tile, padded_rank(module.rank)
        self.scales[layer, projection] = module.scale


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The location of an adapter's matrices in its pages. `num_tiles` is the length of the longest layer's stream."""

    layers: Table
    edges: Table
    pieces: tuple[tuple[Piece, ...], ...]
    num_tiles: int
    has_head: bool
    embedding_rank: int


def build_layout(adapter: PeftAdapter, model: ModelConfig) -> AdapterLayout:
    """Lay out the matrices of a checked adapter; projections that it does not adapt take no space."""
    builder = _Builder(model)
    for module in sorted(adapter.modules, key=lambda m: ORDER.get(m.module.projection, len(ORDER))):
        builder.add(module)
    return builder.layout()


class _Builder:
    """Builds a layout by appending matrices to the layers' streams."""

    def __init__(self, model: ModelConfig) -> None:
        self._hidden_size, self._stripes = model.hidden_size, Stripes.of(model)
        self._layers, self._edges = Table.empty(model.num_layers), Table.empty(model.num_layers)
        self._pieces: list[list[Piece]] = [[] for _ in range(model.num_layers)]
        self._has_head, self._embedding_rank = False, 0

    def layout(self) -> AdapterLayout:
        """The layout of the modules added so far."""
        pieces = tuple(tuple(stream) for stream in self._pieces)
        num_tiles = max(_length(stream) for stream in pieces)
        return AdapterLayout(self._layers, self._edges, pieces, num_tiles, self._has_head, self._embedding_rank)

    def add(self, module: LoraModule) -> None:
        """Append A and B of a module."""
        match module.module.projection:
            case "lm_head":
                self._add_head(module)
            case "embed_tokens":
                self._add_embedding(module)
            case projection:
                assert module.module.layer is not None
                first = self._append_pair(module.module.layer, module, slice(0, module.module.out_features))
                self._layers.set(module.module.layer, ORDER[projection], first, module)

    def _add_head(self, module: LoraModule) -> None:
        self._has_head = True
        for layer, columns in self._stripes:
            self._edges.set(layer, HEAD_STRIPE, self._append_pair(layer, module, columns), module)

    def _add_embedding(self, module: LoraModule) -> None:
        rank = self._embedding_rank = padded_rank(module.rank)
        for layer, columns in self._stripes:
            first = self._append(layer, module.rank, columns, module.down)
            self._edges.set(layer, EMBEDDING_STRIPE, first, module)
        first = self._append(0, rank, slice(0, rank), None)
        self._append(0, module.rank, slice(0, self._hidden_size), module.up, transposed=True)
        self._edges.set(0, EMBEDDING_EXPANSION, first, module)

    def _append_pair(self, layer: int, module: LoraModule, columns: slice) -> int:
        """Append A and some columns of B transposed; returns the first tile."""
        first = self._append(layer, module.rank, slice(0, module.module.in_features), module.down)
        self._append(layer, module.rank, columns, module.up, transposed=True)
        return first

    def _append(
        self, layer: int, rank: int, columns: slice, stored: StoredTensor | None, *, transposed: bool = False
    ) -> int:
        """Append one matrix to a layer's stream; returns its first tile."""
        first = _length(self._pieces[layer])
        num_tiles = padded_rank(rank) // TILE_RANKS * column_tiles(columns.stop - columns.start)
        self._pieces[layer].append(Piece(first, num_tiles, rank, columns, stored, transposed))
        return first


def _length(stream: Sequence[Piece]) -> int:
    return stream[-1].first_tile + stream[-1].num_tiles if stream else 0


def write_adapter(layout: AdapterLayout, path: Path, tiles: Tensor, pages: Sequence[PageId]) -> None:
    """Copy an adapter from its file into pages, one layer at a time, converted to the pages' dtype.

    tiles: [layer, page, tile in the page, 8 ranks, 64 columns], as `Storage.tiles`.
    """
    file, index = map_file(path), torch.tensor(pages)
    stream = torch.zeros(len(pages) * tiles.shape[2], TILE_RANKS, TILE_COLUMNS, dtype=tiles.dtype)
    for layer, pieces in enumerate(layout.pieces):
        if not pieces:
            continue
        for piece in pieces:
            _copy_tiles(stream[piece.first_tile : piece.first_tile + piece.num_tiles], piece.matrix(file))
        tiles[layer].index_copy_(0, index, stream.view(len(pages), *tiles.shape[2:]))


def _copy_tiles(tiles: Tensor, matrix: Tensor) -> None:
    """Like `tiles_of`, but writes in place and copies only once if no padding is needed."""
    ranks, columns = matrix.shape
    if ranks % TILE_RANKS or columns % TILE_COLUMNS:
        tiles.copy_(tiles_of(matrix))
        return
    blocks = matrix.view(-1, TILE_RANKS, columns // TILE_COLUMNS, TILE_COLUMNS).transpose(1, 2)
    tiles.view(blocks.shape).copy_(blocks)
