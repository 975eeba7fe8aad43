"""Frequencies of rotary position embeddings."""

import math

import torch

from engine.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements, fp32 (head_dim / 2)."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: waves too long for the original context are slowed by `factor`, short ones kept, others blended."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, fp32 (tokens, head_dim / 2)."""
    turned = positions.float()[:, None] * frequencies
    return turned.cos(), turned.sin()
