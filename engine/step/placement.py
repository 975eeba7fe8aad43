"""A step's metadata as flat arrays and back as tensors elsewhere, padded where a recorded step wants fixed sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import AttentionBatch, LoraBatch
from engine.lora.edges import EdgeBatch
from engine.model.batch import NO_SLOT, StepBatch

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a batch is padded to. `sequences` are rows too, as each of them has one token."""

    sequences: int
    blocks: int


def arrays_of(batch: StepBatch) -> list[Array]:
    """Every array of a batch that lies in host memory, in a fixed order."""
    attention = batch.attention
    tensors = [
        *(batch.token_ids, attention.block_tables, attention.query_starts, attention.context_lens, batch.sampled_rows),
        *_segments(batch.lora),
        *_segments(batch.edges.head if batch.edges is not None else None),
    ]
    return [tensor.numpy() for tensor in tensors]


def _segments(lora: LoraBatch | None) -> list[Tensor]:
    return [] if lora is None else [lora.segments, lora.segment_slots]


def with_tensors(batch: StepBatch, tensors: Sequence[Tensor]) -> StepBatch:
    """The same batch with other tensors for its arrays."""
    rest = iter(tensors)
    token_ids, tables, starts, lengths, sampled = (next(rest) for _ in range(5))
    lora = _moved(batch.lora, rest)
    edges = batch.edges
    if edges is not None:
        edges = EdgeBatch(edges.embedding, _moved(edges.head, rest))
    return StepBatch(token_ids, AttentionBatch(tables, starts, lengths), lora, edges, sampled)


def _moved(lora: LoraBatch | None, tensors: Iterator[Tensor]) -> LoraBatch | None:
    return None if lora is None else LoraBatch(lora.tables, next(tensors), next(tensors))


def without_mix(batch: StepBatch) -> StepBatch:
    """As many segments as sequences, whoever shares adapters, so that the mix does not choose the kernels' blocks.

    A batch of one adapter alone keeps its one segment: its matrices are then read once for all rows.
    """
    lora, sequences = batch.lora, len(batch.attention.context_lens)
    if lora is None or len(lora.segment_slots) == 1:
        return batch
    return replace(batch, lora=_with_segments(lora, sequences))


def padded(batch: StepBatch, sizes: Sizes) -> StepBatch:
    """A decode batch with rows that belong to no sequence behind its own: nothing is computed of their attention.

    What the dense operators make of them is never read.
    """
    attention, rows = batch.attention, sizes.sequences
    tables = np.zeros((rows, sizes.blocks), np.int32)
    own = attention.block_tables.numpy()
    tables[: len(own), : own.shape[1]] = own
    lora = batch.lora
    if lora is not None and len(lora.segment_slots) > 1:
        lora = _with_segments(lora, rows)
    return StepBatch(
        token_ids=_grown(batch.token_ids, rows, 0),
        attention=AttentionBatch(
            _tensor(tables),
            _grown(attention.query_starts, rows + 1, len(own)),
            _grown(attention.context_lens, rows, 0),
        ),
        lora=lora,
        edges=None,
        sampled_rows=_tensor(np.arange(rows, dtype=np.int64)),
    )


def _with_segments(lora: LoraBatch, count: int) -> LoraBatch:
    end = int(lora.segments[-1])
    return LoraBatch(lora.tables, _grown(lora.segments, count + 1, end), _grown(lora.segment_slots, count, NO_SLOT))


def _grown(values: Tensor, length: int, filler: int) -> Tensor:
    array = values.numpy()
    return _tensor(np.concatenate((array, np.full(length - len(array), filler, array.dtype))))


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)
