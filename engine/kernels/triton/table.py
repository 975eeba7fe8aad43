"""Block sizes of every kernel, by shape class and architecture, and where each row was measured.

A shape class is the phase of the step (in attention, of its sequences) and, where it matters, the size of the product;
"invariant" covers every phase of a backend whose results must not depend on the phase. A device uses the rows of the
newest architecture that is not newer than itself: 86 and 89 use the rows of 80, 120 those of 100.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["decode", "prefill", "invariant"]
Architecture = Literal[80, 90, 100]

ARCHITECTURES: tuple[Architecture, ...] = (80, 90, 100)
NOT_MEASURED = "chosen by occupancy, not yet measured"

# A LoRA product counts as prefill if its segments have more rows than this on average.
DECODE_ROWS = 16
WIDE_INPUT = 2048
KEY_BYTES = 256
FLOAT32_BYTES = 4
MIN_DOT = 16  # the smallest dimension of a tensor core product
MAX_FP16_TILES = 2
COMBINED_PARTS = 16  # parts of a context that are read at once; 4096 positions have this many


@dataclass(frozen=True)
class ShrinkBlocks:
    """Rows, column tiles and ranks of a block; K in `split_k` parts; `lanes` programs divide an adapter's ranks."""

    block_m: int
    tiles_k: int
    block_r: int
    split_k: int
    lanes: int
    num_warps: int
    num_stages: int
    measured: str = NOT_MEASURED


@dataclass(frozen=True)
class ExpandBlocks:
    """Rows, column tiles and ranks of a block."""

    block_m: int
    tiles_n: int
    block_r: int
    num_warps: int
    num_stages: int
    measured: str = NOT_MEASURED

    def tiles_of(self, dtype: torch.dtype) -> int:
        """Column tiles of a block: fp16 is multiplied in tf32, whose wider operands would spill."""
        return min(self.tiles_n, MAX_FP16_TILES) if dtype == torch.float16 else self.tiles_n


@dataclass(frozen=True)
class AttentionBlocks:
    """Query rows (tokens times heads of a group) and keys of a block; keys per part of the context, 0 = one part.

    `block_c` is for keys of up to 256 bytes; longer keys get smaller blocks, so that a block fits in shared memory.
    """

    block_m: int
    block_c: int
    partition: int
    num_warps: int
    num_stages: int
    measured: str = NOT_MEASURED

    def keys_of(self, key_bytes: int) -> int:
        """Keys of a block if a key has that many bytes, a power of two."""
        return max(self.block_c * KEY_BYTES // max(key_bytes, KEY_BYTES), MIN_DOT)


@dataclass(frozen=True)
class LinearBlocks:
    """Rows, outputs and inputs of a block."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    measured: str = NOT_MEASURED


@dataclass(frozen=True)
class RowBlocks:
    """Columns that one program processes at a time, 0 = the whole row."""

    block: int
    num_warps: int
    measured: str = NOT_MEASURED


SHRINK: dict[tuple[Phase, str, Architecture], ShrinkBlocks] = {
    ("decode", "narrow", 80): ShrinkBlocks(16, 2, 16, 4, 2, 2, 3),
    ("decode", "narrow", 90): ShrinkBlocks(16, 2, 16, 4, 2, 2, 4),
    ("decode", "narrow", 100): ShrinkBlocks(16, 2, 16, 4, 2, 2, 4),
    ("decode", "wide", 80): ShrinkBlocks(16, 2, 16, 8, 2, 2, 3),
    ("decode", "wide", 90): ShrinkBlocks(16, 2, 16, 8, 2, 2, 4),
    ("decode", "wide", 100): ShrinkBlocks(16, 2, 16, 8, 2, 2, 4),
    ("prefill", "narrow", 80): ShrinkBlocks(64, 1, 16, 1, 1, 4, 3),
    ("prefill", "narrow", 90): ShrinkBlocks(64, 1, 16, 1, 1, 4, 4),
    ("prefill", "narrow", 100): ShrinkBlocks(64, 1, 16, 1, 1, 4, 4),
    ("prefill", "wide", 80): ShrinkBlocks(64, 1, 16, 4, 1, 4, 3),
    ("prefill", "wide", 90): ShrinkBlocks(64, 1, 16, 4, 1, 4, 4),
    ("prefill", "wide", 100): ShrinkBlocks(64, 1, 16, 4, 1, 4, 4),
    ("invariant", "narrow", 80): ShrinkBlocks(16, 2, 16, 4, 2, 2, 3),
    ("invariant", "narrow", 90): ShrinkBlocks(16, 2, 16, 4, 2, 2, 4),
    ("invariant", "narrow", 100): ShrinkBlocks(16, 2, 16, 4, 2, 2, 4),
    ("invariant", "wide", 80): ShrinkBlocks(16, 2, 16, 8, 2, 2, 3),
    ("invariant", "wide", 90): ShrinkBlocks(16, 2, 16, 8, 2, 2, 4),
    ("invariant", "wide", 100): ShrinkBlocks(16, 2, 16, 8, 2, 2, 4),
}

EXPAND: dict[tuple[Phase, Architecture], ExpandBlocks] = {
    ("decode", 80): ExpandBlocks(16, 4, 16, 4, 2),
    ("decode", 90): ExpandBlocks(16, 4, 16, 4, 2),
    ("decode", 100): ExpandBlocks(16, 4, 16, 4, 2),
    ("prefill", 80): ExpandBlocks(64, 1, 16, 4, 2),
    ("prefill", 90): ExpandBlocks(64, 2, 16, 4, 2),
    ("prefill", 100): ExpandBlocks(64, 2, 16, 4, 2),
    ("invariant", 80): ExpandBlocks(16, 4, 16, 4, 2),
    ("invariant", 90): ExpandBlocks(16, 4, 16, 4, 2),
    ("invariant", 100): ExpandBlocks(16, 4, 16, 4, 2),
}

ATTENTION: dict[tuple[Phase, Architecture], AttentionBlocks] = {
    ("decode", 80): AttentionBlocks(16, 32, 256, 4, 3),
    ("decode", 90): AttentionBlocks(16, 32, 256, 4, 3),
    ("decode", 100): AttentionBlocks(16, 32, 256, 4, 3),
    ("prefill", 80): AttentionBlocks(64, 16, 0, 4, 2),
    ("prefill", 90): AttentionBlocks(64, 64, 0, 4, 2),
    ("prefill", 100): AttentionBlocks(64, 64, 0, 4, 2),
    ("invariant", 80): AttentionBlocks(16, 32, 0, 4, 3),
    ("invariant", 90): AttentionBlocks(16, 32, 0, 4, 3),
    ("invariant", 100): AttentionBlocks(16, 32, 0, 4, 3),
}

# The base product of a batch-invariant backend; other backends use cuBLAS.
LINEAR: dict[Architecture, LinearBlocks] = {
    80: LinearBlocks(64, 64, 64, 4, 3),
    90: LinearBlocks(64, 64, 64, 4, 4),
    100: LinearBlocks(64, 64, 64, 4, 4),
}

# Kernels without a product are bound by memory bandwidth; their rows are the same on every architecture.
ROWS: dict[str, RowBlocks] = {
    "combine": RowBlocks(0, 1),
    "rope_write_kv": RowBlocks(8, 2),
    "rms_norm": RowBlocks(0, 4),
    "silu_mul": RowBlocks(1024, 4),
    "embed": RowBlocks(1024, 4),
    "logit_stats": RowBlocks(4096, 8),
    "draw": RowBlocks(1024, 4),
}


def row_architecture(capability: int) -> Architecture:
    """The rows that a device of this compute capability (major times ten plus minor) uses."""
    older = [architecture for architecture in ARCHITECTURES if architecture <= capability]
    assert older, f"compute capability {capability / 10} is too old; the kernels need 8.0 or newer"
    return older[-1]


def phase(num_rows: int, num_segments: int, *, invariant: bool = False) -> Phase:
    """The phase of a step for LoRA products, from the only numbers that the host knows."""
    if invariant:
        return "invariant"
    return "prefill" if num_rows > DECODE_ROWS * num_segments else "decode"


def rows(block_m: int, itemsize: int) -> int:
    """Rows of a block for values of that size: fp32 products run on CUDA cores, where large blocks would spill."""
    return block_m if itemsize < FLOAT32_BYTES else MIN_DOT


def width(in_features: int) -> str:
    """The width class of a product's input: a wide one is split into more parts."""
    return "wide" if in_features >= WIDE_INPUT else "narrow"
