"""Conversion of matrices to tiles and back.

A tile is 8 ranks x 64 columns, row-major. A [R, K] matrix is cut into rank groups of 8 (outermost) and columns of 64;
ranks and columns past its edge are zero. B is stored transposed, [R, N], in the same layout.
"""

import torch
from torch import Tensor

from engine.kernels.types import TILE_COLUMNS, TILE_RANKS


def padded_rank(rank: int) -> int:
    """`rank` rounded up to whole tiles."""
    return -(-rank // TILE_RANKS) * TILE_RANKS


def column_tiles(columns: int) -> int:
    """Number of tiles across `columns`."""
    return -(-columns // TILE_COLUMNS)


def tiles_of(matrix: Tensor) -> Tensor:
    """[R, K] -> [tiles, 8, 64], zero padded."""
    ranks, columns = matrix.shape
    groups, across = padded_rank(ranks) // TILE_RANKS, column_tiles(columns)
    padded = matrix.new_zeros(groups * TILE_RANKS, across * TILE_COLUMNS)
    padded[:ranks, :columns] = matrix
    return padded.view(groups, TILE_RANKS, across, TILE_COLUMNS).transpose(1, 2).reshape(-1, TILE_RANKS, TILE_COLUMNS)


def matrix_of(tiles: Tensor, ranks: int, columns: int) -> Tensor:
    """[tiles, 8, 64] -> [ranks, columns], the inverse of `tiles_of`."""
    groups, across = padded_rank(ranks) // TILE_RANKS, column_tiles(columns)
    padded = tiles.view(groups, across, TILE_RANKS, TILE_COLUMNS).transpose(1, 2)
    return padded.reshape(groups * TILE_RANKS, across * TILE_COLUMNS)[:ranks, :columns]


def tile_bytes(dtype: torch.dtype) -> int:
    """Bytes per tile; a page must hold a whole number of tiles."""
    return TILE_RANKS * TILE_COLUMNS * dtype.itemsize
