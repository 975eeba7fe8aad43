"""The Llama-family decoder, from token ids to logits.

Each operator runs once over all tokens of a step, regardless of their adapters and sequences.
"""

import torch
from torch import Tensor

from engine.files.model_config import ModelConfig
from engine.kernels import Kernels, PackedLinear
from engine.lora.edges import Edges
from engine.lora.layout import Stripes
from engine.lora.tables import SlotTables
from engine.memory.storage import Storage
from engine.model.batch import StepBatch
from engine.model.rope import cos_sin
from engine.model.weights import LayerWeights, ModelWeights
from engine.model.workspace import Activations, Workspace

# Each fused group's first projection, as an index into kernels.PROJECTIONS.
QKV, OUTPUT, GATE_UP, DOWN = 0, 3, 4, 6


class Decoder:
    """A base model's forward pass; each step brings its own adapters, stored in the pool's pages."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        storage: Storage,
        tables: SlotTables,
        workspace: Workspace,
    ) -> None:
        self.config = config
        self._weights, self._kernels, self._kv, self._tables = weights, kernels, storage.kv, tables
        self._edges = Edges(kernels, storage, Stripes.of(config))
        self._workspace = workspace
        self.max_tokens = longest = min(config.max_position, storage.num_pages * storage.tokens_per_page)
        self._cos_sin = cos_sin(config.rope, config.head_dim, longest).to(storage.pool.device)

    def forward(self, step: StepBatch) -> Tensor:
        """Compute a step and store its keys and values.

        Returns fp32 logits (sampled rows, vocabulary), valid until the next call.
        """
        self._kernels.begin_step()
        a = self._workspace.rows(step.num_tokens)
        self._embed(a.x, step)
        for index, layer in enumerate(self._weights.layers):
            self._norm(a, layer.input_norm, a.x if index == 0 else None)
            self._attend(index, layer, a, step)
            self._norm(a, layer.post_norm)
            self._linear(index, GATE_UP, layer.gate_up, a.normed, a.gate_up, step)
            self._kernels.silu_mul(a.gate_up, a.gated)
            self._linear(index, DOWN, layer.down, a.gated, a.y, step)
        return self._logits(a, step)

    def _embed(self, x: Tensor, step: StepBatch) -> None:
        self._kernels.embed(step.token_ids, self._weights.embedding, x)
        for rows in step.edges.embedding if step.edges is not None else ():
            self._edges.add_embedding(x, step.token_ids, rows, self._tables.edges)

    def _norm(self, a: Activations, weight: Tensor, first: Tensor | None = None) -> None:
        """Add y to the residual stream and normalize the sum; `first` is the input of the first layer, without a y."""
        if first is not None:
            self._kernels.rms_norm(first, weight, self.config.rms_norm_eps, a.normed)
        else:
            self._kernels.rms_norm(a.y, weight, self.config.rms_norm_eps, a.normed, residual=a.x)

    def _attend(self, index: int, layer: LayerWeights, a: Activations, step: StepBatch) -> None:
        config, attention = self.config, step.attention
        rotary = self._cos_sin if config.rotary_layers[index] else None
        self._linear(index, QKV, layer.qkv, a.normed, a.qkv, step)
        self._kernels.rope_write_kv(
            a.qkv, self._kv, index, attention, config.num_heads, rotary, layer.q_norm, layer.k_norm, config.rms_norm_eps
        )
        scale, window = config.head_dim**-0.5, config.windows[index] or 0
        self._kernels.paged_attention(
            a.qkv, self._kv, index, attention, config.num_heads, scale, a.attended, window=window
        )
        self._linear(index, OUTPUT, layer.o, a.attended, a.y, step)

    def _linear(
        self, index: int, projection: int, weight: PackedLinear, x: Tensor, out: Tensor, step: StepBatch
    ) -> None:
        if step.lora is None:
            self._kernels.linear(x, weight, out)
        else:
            self._kernels.lora_linear(x, weight, step.lora, index, projection, out)

    def _logits(self, a: Activations, step: StepBatch) -> Tensor:
        rows = self._workspace.sampled(len(step.sampled_rows))
        torch.index_select(a.x, 0, step.sampled_rows, out=rows.x)
        torch.index_select(a.y, 0, step.sampled_rows, out=rows.y)
        self._kernels.rms_norm(rows.y, self._weights.norm, self.config.rms_norm_eps, rows.normed, residual=rows.x)
        self._kernels.linear(rows.normed, self._weights.head, rows.logits)
        if step.edges is not None and step.edges.head is not None:
            self._edges.add_head(rows.logits, rows.normed, step.edges.head)
        return rows.logits
