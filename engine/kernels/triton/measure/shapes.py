"""Every launch in the steps of a model, recorded without a device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.layout import tile_bytes
from engine.kernels.triton import TritonKernels
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.table import Architecture
from engine.kernels.types import TILE_COLUMNS, AttentionBatch, KvCache, Limits, LoraBatch, LoraTables, PackedLinear

TOKENS_PER_PAGE = 16
# Number of sequences and tokens per sequence, as known to the host. A mixed step needs no additional variants.
STEPS = {"decode": (32, 1), "prefill": (1, 2048), "invariant": (4, 128), "mixed": (32, 16)}
COMPILED = ("decode", "prefill", "invariant")
WITH_DOT = ("shrink", "expand", "attend", "linear")
RANK = 16


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of the Llama family."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...], int]]:
        """(inputs, outputs of each projection, first projection) of every fused group."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv), 0),
            "o": (q, (self.hidden,), 3),
            "gate_up": (self.hidden, (self.inner, self.inner), 4),
            "down": (self.inner, (self.hidden,), 6),
        }

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a page of TOKENS_PER_PAGE tokens, rounded up to whole tiles as in the engine."""
        tile = tile_bytes(dtype)
        return -(-TOKENS_PER_PAGE * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize // tile) * tile


MODELS = (
    ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
)
LLAMA = MODELS[1]


def launches(
    model: ModelShape, architecture: Architecture, phase: str, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    """The launches of one layer, the embedding and the head in a step; nothing is computed."""
    recorded: list[Launch] = []
    kernels = TritonKernels(recorded.append, architecture, batch_invariant=phase == "invariant")
    num_sequences, tokens = STEPS[phase]
    step = _Step(model, num_sequences * tokens, num_sequences, dtype)
    ids = torch.empty(step.num_tokens, dtype=torch.int64, device="meta")
    table = step.values(model.vocabulary, model.hidden)
    kernels.embed(ids, PackedLinear(table, None, model.hidden, (model.vocabulary,), dtype), step.rows(model.hidden))
    kernels.rms_norm(step.rows(model.hidden), step.weight(), 1e-5, step.rows(model.hidden))
    for name, (inputs, outputs, projection) in model.groups.items():
        kernels.lora_apply(step.rows(sum(outputs)), step.rows(inputs), outputs, step.lora(), 1, projection)
        if phase == "invariant":
            kernels.linear(step.rows(inputs), step.matrix(name), step.rows(sum(outputs)))
        if name == "qkv":
            _attend(kernels, step)
        if name == "gate_up":
            kernels.silu_mul(step.rows(2 * model.inner), step.rows(model.inner))
    kernels.rms_norm(step.rows(model.hidden), step.weight(), 1e-5, step.rows(model.hidden), step.rows(model.hidden))
    _adapt_embedding(kernels, step)
    _logits(kernels, step, is_invariant=phase == "invariant")
    if phase != "prefill":
        _draw(kernels, model.vocabulary)
    return recorded


def _adapt_embedding(kernels: TritonKernels, step: "_Step") -> None:
    """One adapter's expansion of its embedding rows, for ranks that do and do not fill whole blocks."""
    rows = step.num_tokens // step.num_sequences
    bounds, slots = step.integers(2), step.integers(1)
    for rank in (RANK, RANK // 2):
        one = LoraBatch(step.lora().tables, bounds, slots)
        kernels.lora_apply(
            step.values(rows, step.model.hidden), step.values(rows, rank), (step.model.hidden,), one, 0, 2
        )


def _logits(kernels: TritonKernels, step: "_Step", *, is_invariant: bool) -> None:
    """The head for one row per sequence, the adapters' part of a stripe of it, and the statistics for sampling."""
    model, rows = step.model, step.num_sequences
    logits, x = torch.empty(rows, model.vocabulary, device="meta"), step.values(rows, model.hidden)
    if is_invariant:
        kernels.linear(x, step.matrix("head"), logits)
    stripe = -(-model.vocabulary // TILE_COLUMNS // model.num_layers) * TILE_COLUMNS
    kernels.lora_apply(logits[:, stripe : 2 * stripe], x, (stripe,), step.lora(), 1, 0)
    kernels.logit_stats(logits)


def _draw(kernels: TritonKernels, vocabulary: int) -> None:
    """Draw from a few rows, all of them restricted."""
    floats, ids = (torch.empty(4, dtype=dtype, device="meta") for dtype in (torch.float64, torch.int64))
    kernels.draw(torch.empty(4, vocabulary, device="meta"), Limits(floats, floats, floats, ids, ids, floats))


def _attend(kernels: TritonKernels, step: "_Step") -> None:
    model = step.model
    qkv = step.rows((model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    kv, batch = KvCache(step.pool(), model.num_kv_heads, model.head_dim), step.attention()
    turn = torch.empty(4096, model.head_dim, device="meta")
    kernels.rope_write_kv(qkv, kv, 1, batch, model.num_heads, turn)
    out = step.rows(model.num_heads * model.head_dim)
    kernels.paged_attention(qkv, kv, 1, batch, model.num_heads, model.head_dim**-0.5, out)


@dataclass(frozen=True)
class _Step:
    """Tensors without memory, except the adapters' ranks, which the host reads."""

    model: ModelShape
    num_tokens: int
    num_sequences: int
    dtype: torch.dtype

    def values(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device="meta")

    def rows(self, width: int) -> Tensor:
        return self.values(self.num_tokens, width)

    def weight(self) -> Tensor:
        return self.values(self.model.hidden)

    def matrix(self, group: str) -> PackedLinear:
        model = self.model
        inputs, outputs, _ = {**model.groups, "head": (model.hidden, (model.vocabulary,), 0)}[group]
        bias = self.values(sum(outputs)) if group == "qkv" and model.qkv_bias else None
        return PackedLinear(self.values(sum(outputs), inputs), bias, inputs, outputs, self.dtype)

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    def pool(self) -> Tensor:
        shape = (self.model.num_layers, 4096, self.model.page_bytes(self.dtype))
        return torch.empty(*shape, dtype=torch.uint8, device="meta")

    def attention(self) -> AttentionBatch:
        sequences = self.num_sequences
        return AttentionBatch(self.integers(sequences, 100), self.integers(sequences + 1), self.integers(sequences))

    def lora(self) -> LoraBatch:
        layers, sequences = self.model.num_layers, self.num_sequences
        parts = torch.full((sequences, layers, 7, 2), RANK, dtype=torch.int32)
        scales = torch.empty(sequences, layers, 7, device="meta")
        tables = LoraTables(self.pool(), self.integers(sequences, 100), parts, scales)
        return LoraBatch(tables, self.integers(sequences + 1), self.integers(sequences))


def all_launches(architecture: Architecture) -> Iterator[tuple[str, Launch]]:
    """(phase, launch) of every model's steps, for one architecture's rows of the table.

    In bf16, plus the products of one model in fp16, whose expand multiplies differently.
    """
    for model in MODELS:
        for phase in COMPILED:
            for launch in launches(model, architecture, phase):
                yield phase, launch
    for phase in ("decode", "prefill"):
        for launch in launches(LLAMA, architecture, phase, torch.float16):
            if launch.name in WITH_DOT:
                yield f"{phase} fp16", launch
