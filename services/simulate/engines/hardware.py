"""Sizes that follow from a model's shape, and what the data sheet of a GPU promises. Pure arithmetic."""

from dataclasses import dataclass
from functools import cached_property

TILE_RANKS, TILE_COLUMNS = 8, 64
"""As in engine/kernels: an adapter's page holds whole tiles."""


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The engine's pages: one page id is one KV block, or a run of an adapter's tiles, in every layer."""

    tokens_per_page: int
    tiles_per_page: int
    bytes_per_page: int

    def pages_for(self, num_tokens: int) -> int:
        """KV pages of that many tokens."""
        return -(-num_tokens // self.tokens_per_page)


@dataclass(frozen=True)
class ModelShape:
    """A Llama-family model; sizes are features, values have `value_bytes` each."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    q_size: int
    kv_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    value_bytes: int = 2

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's seven projections."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = ((hidden, self.q_size), (hidden, self.kv_size), (hidden, self.kv_size), (self.q_size, hidden))
        return (*attention, (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def num_parameters(self) -> int:
        """Weights of the projections, the embedding and the head; norms are left out."""
        layers = self.num_layers * sum(inputs * outputs for inputs, outputs in self.projections)
        return layers + self.hidden_size * self.vocab_size * (1 if self.tie_word_embeddings else 2)

    @cached_property
    def step_parameters(self) -> int:
        """Weights that every step reads and multiplies by: all but the embedding's table."""
        layers = self.num_layers * sum(inputs * outputs for inputs, outputs in self.projections)
        return layers + self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_parameters * self.value_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_size * self.num_layers * self.value_bytes

    def pages(self, tokens_per_page: int = 16) -> PageSizes:
        """The engine's pages of at least that many tokens, rounded up to whole tiles."""
        token, tile = 2 * self.kv_size * self.value_bytes, TILE_RANKS * TILE_COLUMNS * self.value_bytes
        tiles = -(-tokens_per_page * token // tile)
        return PageSizes(tiles * tile // token, tiles, self.num_layers * tiles * tile)

    def adapter_pages(self, rank: int, pages: PageSizes) -> int:
        """Pages of an adapter of all seven projections; 0 for rank 0, the base model."""
        across = sum(-(-inputs // TILE_COLUMNS) - (-outputs // TILE_COLUMNS) for inputs, outputs in self.projections)
        return -(-(-(-rank // TILE_RANKS) * across) // pages.tiles_per_page)

    def adapter_bytes(self, rank: int) -> int:
        """Bytes of such an adapter's file."""
        per_rank = sum(inputs + outputs for inputs, outputs in self.projections)
        return self.num_layers * rank * per_rank * self.value_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: memory, its bandwidth, dense bf16 FLOP/s, and its link to the host."""

    memory_bytes: float
    bytes_per_s: float
    flops: float
    host_bytes_per_s: float


MODELS = {
    "llama-8b": ModelShape(32, 4096, 14336, 4096, 1024, 128256),
    "smollm2-135m": ModelShape(30, 576, 1536, 576, 192, 49152, tie_word_embeddings=True),
}
GPUS = {
    "h200": Gpu(141e9, 4.8e12, 989e12, 55e9),
    "h100": Gpu(80e9, 3.35e12, 989e12, 55e9),
    "l40s": Gpu(48e9, 0.864e12, 362e12, 25e9),
}
