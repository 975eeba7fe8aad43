"""An adapter as tiles in pages: where each of its matrices lies, and how they get there from the file.

In every layer an adapter is one stream of tiles, A then B transposed of each projection it has, each at its own rank
rounded up to a tile's eight. What belongs to no layer is cut into stripes of vocabulary, one behind each layer's
stream: of the head every stripe has A and its columns of B, of the embedding its columns of A. The embedding's B
follows in layer 0, with an identity in A's place: its product by a column of A is an adapter's expansion as well.
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

# The columns of the edges' tables, which are shaped like the layers' own.
HEAD_STRIPE, EMBEDDING_STRIPE, EMBEDDING_EXPANSION = range(3)

ORDER = {f"{name}_proj": index for index, name in enumerate(PROJECTIONS)}


def to_tensor(stored: StoredTensor, file: Bytes | None = None) -> Tensor:
    """The stored values without a copy, mapped from the file (or from `file`, the mapping of it)."""
    bits = stored.bits(file)
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(TORCH_DTYPES[stored.dtype])


@dataclass(frozen=True, slots=True)
class Stripes:
    """The vocabulary cut into runs of whole tiles, one for each layer; the last one may be short, and some left out."""

    vocabulary: int
    width: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Stripes":
        """As even as whole tiles allow."""
        return cls(model.vocab_size, -(-column_tiles(model.vocab_size) // model.num_layers) * int(TILE_COLUMNS))

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """(layer, its token ids) of every stripe that is not empty."""
        for layer, start in enumerate(range(0, self.vocabulary, self.width)):
            yield layer, slice(start, min(start + self.width, self.vocabulary))


@dataclass(frozen=True, slots=True)
class Piece:
    """One [rank, columns] matrix of a stream: these columns of the stored tensor, turned if need be.

    Without a stored tensor it is the identity.
    """

    first_tile: int
    num_tiles: int
    rank: int
    columns: slice
    stored: StoredTensor | None
    turned: bool

    def matrix(self, file: Bytes) -> Tensor:
        """The matrix in the mapped file."""
        if self.stored is None:
            return torch.eye(self.rank)
        tensor = to_tensor(self.stored, file)
        return (tensor.T if self.turned else tensor)[:, self.columns]


@dataclass(slots=True)
class Table:
    """Rows of the kernels' tables for one adapter: (first tile, padded rank) and scale by layer and projection."""

    parts: Ints
    scales: Floats

    @classmethod
    def empty(cls, num_layers: int) -> "Table":
        """Nothing is adapted."""
        projections = len(PROJECTIONS)
        return cls(np.zeros((num_layers, projections, 2), np.int32), np.zeros((num_layers, projections), np.float32))

    def put(self, layer: int, projection: int, first_tile: int, module: LoraModule) -> None:
        """Say where a module's A begins; B follows it."""
        self.parts[layer, projection] = first_tile, padded_rank(module.rank)
        self.scales[layer, projection] = module.scale


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Where everything of an adapter lies in its pages. `num_tiles` is of the longest layer's stream."""

    layers: Table
    edges: Table
    pieces: tuple[tuple[Piece, ...], ...]
    num_tiles: int
    has_head: bool
    embedding_rank: int


def lay_out(adapter: PeftAdapter, model: ModelConfig) -> AdapterLayout:
    """Give every matrix of a checked adapter its place; what it does not adapt takes none."""
    builder = _Builder(model)
    for module in sorted(adapter.modules, key=lambda m: ORDER.get(m.module.projection, len(ORDER))):
        builder.add(module)
    return builder.layout()


class _Builder:
    """Appends matrices to the layers' streams."""

    def __init__(self, model: ModelConfig) -> None:
        self._hidden_size, self._stripes = model.hidden_size, Stripes.of(model)
        self._layers, self._edges = Table.empty(model.num_layers), Table.empty(model.num_layers)
        self._pieces: list[list[Piece]] = [[] for _ in range(model.num_layers)]
        self._has_head, self._embedding_rank = False, 0

    def layout(self) -> AdapterLayout:
        """What has been added."""
        pieces = tuple(tuple(stream) for stream in self._pieces)
        num_tiles = max(_length(stream) for stream in pieces)
        return AdapterLayout(self._layers, self._edges, pieces, num_tiles, self._has_head, self._embedding_rank)

    def add(self, module: LoraModule) -> None:
        """A and B of one module."""
        match module.module.projection:
            case "lm_head":
                self._add_head(module)
            case "embed_tokens":
                self._add_embedding(module)
            case projection:
                assert module.module.layer is not None
                first = self._append_pair(module.module.layer, module, slice(0, module.module.out_features))
                self._layers.put(module.module.layer, ORDER[projection], first, module)

    def _add_head(self, module: LoraModule) -> None:
        self._has_head = True
        for layer, columns in self._stripes:
            self._edges.put(layer, HEAD_STRIPE, self._append_pair(layer, module, columns), module)

    def _add_embedding(self, module: LoraModule) -> None:
        rank = self._embedding_rank = padded_rank(module.rank)
        for layer, columns in self._stripes:
            first = self._append(layer, module.rank, columns, module.down)
            self._edges.put(layer, EMBEDDING_STRIPE, first, module)
        first = self._append(0, rank, slice(0, rank), None)
        self._append(0, module.rank, slice(0, self._hidden_size), module.up, turned=True)
        self._edges.put(0, EMBEDDING_EXPANSION, first, module)

    def _append_pair(self, layer: int, module: LoraModule, columns: slice) -> int:
        """A, and these columns of B transposed."""
        first = self._append(layer, module.rank, slice(0, module.module.in_features), module.down)
        self._append(layer, module.rank, columns, module.up, turned=True)
        return first

    def _append(
        self, layer: int, rank: int, columns: slice, stored: StoredTensor | None, *, turned: bool = False
    ) -> int:
        """Put one matrix behind a layer's stream; returns its first tile."""
        first = _length(self._pieces[layer])
        num_tiles = padded_rank(rank) // TILE_RANKS * column_tiles(columns.stop - columns.start)
        self._pieces[layer].append(Piece(first, num_tiles, rank, columns, stored, turned))
        return first


def _length(stream: Sequence[Piece]) -> int:
    return stream[-1].first_tile + stream[-1].num_tiles if stream else 0


def write_adapter(layout: AdapterLayout, path: Path, tiles: Tensor, pages: Sequence[PageId]) -> None:
    """Copy an adapter from its file into pages, one layer at a time, converted to their type.

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
    """As `tiles_of`, into place, without the copies that only padding needs."""
    ranks, columns = matrix.shape
    if ranks % TILE_RANKS or columns % TILE_COLUMNS:
        tiles.copy_(tiles_of(matrix))
        return
    blocks = matrix.view(-1, TILE_RANKS, columns // TILE_COLUMNS, TILE_COLUMNS).transpose(1, 2)
    tiles.view(blocks.shape).copy_(blocks)
