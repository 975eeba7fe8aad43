"""StepBatch: all that the forward pass needs to know of a step."""

from dataclasses import dataclass

import torch

from engine.kernels import AttentionBatch, LoraBatch
from engine.lora.edges import EdgeBatch

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of a step in the plan's order, whose neighbours share an adapter.

    `token_ids` is int64 (tokens); `sampled_rows` are the rows whose next token is sampled, in plan order. `lora` is
    None when no row has an adapter, `edges` when none of them reaches beyond the layers.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    lora: LoraBatch | None
    edges: EdgeBatch | None
    sampled_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return len(self.token_ids)
