"""The decoder of the Llama family, from token ids to logits. Read it top to bottom.

Base products run once over all tokens of a step; what adapters add runs per segment; attention runs per group.
"""

import torch
import torch.nn.functional as F

from engine.batch import StepBatch
from engine.lora import batch as lora
from engine.memory.kv import KvCache
from engine.model import operators as ops
from engine.model.config import ModelConfig
from engine.model.rope import angles, inverse_frequencies
from engine.model.weights import LayerWeights, Linear, ModelWeights

Angles = tuple[torch.Tensor, torch.Tensor]
Masks = dict[int | None, list[torch.Tensor | None]]


class Decoder:
    """A base model in memory; adapters come with each step."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._weights = weights
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(weights.norm.device)

    def forward(self, step: StepBatch, kv: KvCache) -> torch.Tensor:
        """Compute a step, store its keys and values, and return fp32 logits (rows of `step.last_rows`, vocabulary)."""
        turn = angles(step.positions, self._frequencies)
        masks: Masks = {window: [g.mask(window) for g in step.groups] for window in set(self.config.windows)}
        x = self._weights.embedding[step.token_ids]
        lora.add_embedding(x, step.token_ids, step.segments)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(index, layer, x, step, kv, turn, masks)
            x = x + self._mlp(index, layer, x, step)
        return self._logits(x[step.last_rows], step)

    def _attention(
        self, index: int, layer: LayerWeights, x: torch.Tensor, step: StepBatch, kv: KvCache, turn: Angles, masks: Masks
    ) -> torch.Tensor:
        config = self.config
        qkv = self._linear(index, "qkv", layer.qkv, self._norm(x, layer.input_norm), step)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(self._norm(q, layer.q_norm))
            k.copy_(self._norm(k, layer.k_norm))
        if config.rotary_layers[index]:
            ops.rotate(heads[:, : config.num_heads + config.num_kv_heads], *turn)
        kv.write(index, step.write_index, qkv[:, config.q_size :])
        attended = torch.empty_like(q)
        for group, mask in zip(step.groups, masks[config.windows[index]], strict=True):
            keys, values = kv.read(index, group.read_index, group.num_sequences)
            attended[group.tokens] = ops.attend(q[group.tokens], keys, values, group, mask)
        return self._linear(index, "o", layer.o, attended.view(len(x), -1), step)

    def _mlp(self, index: int, layer: LayerWeights, x: torch.Tensor, step: StepBatch) -> torch.Tensor:
        gate_up = self._linear(index, "gate_up", layer.gate_up, self._norm(x, layer.post_norm), step)
        return self._linear(index, "down", layer.down, ops.gated_silu(gate_up), step)

    def _logits(self, x: torch.Tensor, step: StepBatch) -> torch.Tensor:
        x = self._norm(x, self._weights.norm)
        logits = F.linear(x, self._weights.head)
        lora.add_head(logits, x, step.last_segments)
        return logits.float()

    def _linear(self, index: int, name: str, linear: Linear, x: torch.Tensor, step: StepBatch) -> torch.Tensor:
        y = F.linear(x, linear.weight, linear.bias)
        lora.add_layer(y, x, step.segments, index, name)
        return y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight, self.config.rms_norm_eps)
