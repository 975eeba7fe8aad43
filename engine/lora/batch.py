"""The segments of a step: neighbouring rows that share an adapter, each applied at its own rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.lora.weights import AdapterWeights, FusedLora


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start to end of the step belong to one adapter; rows in no segment are the base model's."""

    start: int
    end: int
    adapter: AdapterWeights


def segments(rows: Iterable[tuple[AdapterWeights | None, int]]) -> tuple[Segment, ...]:
    """Join neighbouring (adapter, number of rows) of the same adapter; base rows make no segment."""
    joined: list[Segment] = []
    start = 0
    for adapter, count in rows:
        end = start + count
        if adapter is not None and count:
            if joined and joined[-1].adapter is adapter and joined[-1].end == start:
                joined[-1] = Segment(joined[-1].start, end, adapter)
            else:
                joined.append(Segment(start, end, adapter))
        start = end
    return tuple(joined)


def add_layer(y: torch.Tensor, x: torch.Tensor, parts: Sequence[Segment], layer: int, name: str) -> None:
    """y += scale · x Aᵀ Bᵀ for the rows of each segment; y (rows, out) in place, x (rows, in)."""
    for part in parts:
        fused = part.adapter.layers[layer].get(name)
        if fused is not None:
            _expand(y[part.start : part.end], x[part.start : part.end] @ fused.down.T, fused)


def add_embedding(y: torch.Tensor, token_ids: torch.Tensor, parts: Sequence[Segment]) -> None:
    """y += scale · B A[:, token] for the rows of each segment; y (rows, hidden) in place."""
    for part in parts:
        fused = part.adapter.embedding
        if fused is not None:
            _expand(y[part.start : part.end], fused.down[token_ids[part.start : part.end]], fused)


def add_head(y: torch.Tensor, x: torch.Tensor, parts: Sequence[Segment]) -> None:
    """The same for the logits; y (rows, vocabulary) in place."""
    for part in parts:
        fused = part.adapter.head
        if fused is not None:
            _expand(y[part.start : part.end], x[part.start : part.end] @ fused.down.T, fused)


def _expand(y: torch.Tensor, h: torch.Tensor, fused: FusedLora) -> None:
    for expand in fused.expands:
        y[:, expand.columns].addmm_(h[:, expand.ranks], expand.up.T, alpha=expand.scale)
