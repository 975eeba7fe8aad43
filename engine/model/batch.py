"""StepBatch: the input of a forward pass."""

from dataclasses import dataclass

import torch

from engine.kernels import AttentionBatch, LoraBatch
from engine.lora.edges import EdgeBatch

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of a step, in plan order; tokens with the same adapter are adjacent.

    `token_ids` is int64 (tokens); `sampled_rows` are the rows whose next token is sampled, in plan order. `lora` is
    None if no row has an adapter, `edges` if no adapter in the batch adapts the embedding or the head.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    edges: EdgeBatch | None
    sampled_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in the step."""
        return len(self.token_ids)
