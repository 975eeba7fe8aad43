"""Rotary position embeddings."""

import math

import torch

from engine.files.model_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position for each pair of elements, fp32 (head_dim / 2)."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1 scaling: long wavelengths are stretched by `factor`, short ones kept, those in between interpolated."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def cos_sin(rope: Rope, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of the angles of each position, fp32 (positions, head_dim)."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
