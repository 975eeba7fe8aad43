"""Activation buffers, allocated once for the largest step; each step uses their first rows."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.files.model_config import ModelConfig

MAX_CACHED_VIEWS = 4096


@dataclass(frozen=True, slots=True)
class Activations:
    """One step's rows of each buffer, [tokens, width]. `x` is the residual stream, `y` the next addition to it."""

    x: Tensor
    y: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The buffers for the sampled rows; `logits` is float32 [rows, vocabulary]."""

    x: Tensor
    y: Tensor
    normed: Tensor
    logits: Tensor


class Workspace:
    """The buffers of all steps. On the CPU, physical memory grows with the largest step so far."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, max_tokens: int, max_sampled: int, device: torch.device
    ) -> None:
        def rows(count: int, width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(count, width, dtype=dtype, device=device)

        hidden, inner = model.hidden_size, model.intermediate_size
        self._all = Activations(
            x=rows(max_tokens, hidden),
            y=rows(max_tokens, hidden),
            normed=rows(max_tokens, hidden),
            qkv=rows(max_tokens, model.q_size + 2 * model.kv_size),
            attended=rows(max_tokens, model.q_size),
            gate_up=rows(max_tokens, 2 * inner),
            gated=rows(max_tokens, inner),
        )
        self._sampled = SampledRows(
            x=rows(max_sampled, hidden),
            y=rows(max_sampled, hidden),
            normed=rows(max_sampled, hidden),
            logits=rows(max_sampled, model.vocab_size, torch.float32),
        )
        self.rows = functools.lru_cache(MAX_CACHED_VIEWS)(self._rows)
        self.sampled = functools.lru_cache(MAX_CACHED_VIEWS)(self._sampled_rows)

    def _rows(self, num_tokens: int) -> Activations:
        return Activations(*(getattr(self._all, name)[:num_tokens] for name in Activations.__slots__))

    def _sampled_rows(self, count: int) -> SampledRows:
        return SampledRows(*(getattr(self._sampled, name)[:count] for name in SampledRows.__slots__))
