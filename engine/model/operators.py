"""Operators in plain torch."""

import torch
import torch.nn.functional as F

from engine.batch import AttentionGroup


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, the mean in fp32."""
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return weight * (exact * scale).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn each pair (x[i], x[i + half]) by its angle, in place.

    x (tokens, heads, head_dim), cos and sin (tokens, half)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None], sin[:, None]
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: AttentionGroup, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q kᵀ / √head_dim) v for a group; grouped heads share keys.

    q (sequences · queries, heads, head_dim), keys and values (sequences, kv_heads, tokens, head_dim); like q returned.
    """
    heads, head_dim = q.shape[1:]
    keys, values = keys[:, :, : group.num_keys], values[:, :, : group.num_keys]
    if group.num_queries == 1:
        return _attend_single(q, keys, values, mask)
    queries = q.view(group.num_sequences, group.num_queries, heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(-1, heads, head_dim)


def _attend_single(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One query per sequence: the heads that share keys are the rows of one product."""
    sequences, heads, head_dim = q.shape
    grouped = q.view(sequences, keys.shape[1], -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float() * head_dim**-0.5
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(weights, values).view(sequences, heads, head_dim)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up with both halves in one tensor (tokens, 2 · inner)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
