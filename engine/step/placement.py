"""Flattens a step's metadata into arrays, rebuilds it from tensors on the device, and pads it for recorded steps."""

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
class PaddedSizes:
    """The padded sizes of a decode batch; each sequence has one token, so `sequences` is also the number of rows."""

    sequences: int
    blocks: int


def arrays_of(batch: StepBatch) -> list[Array]:
    """All arrays of a batch in host memory, in a fixed order."""
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
    """The same batch with its arrays replaced by tensors, in the order of `arrays_of`."""
    rest = iter(tensors)
    token_ids, tables, starts, lengths, sampled = (next(rest) for _ in range(5))
    lora = _with_segment_tensors(batch.lora, rest)
    edges = batch.edges
    if edges is not None:
        edges = EdgeBatch(edges.embedding, _with_segment_tensors(edges.head, rest))
    return StepBatch(token_ids, AttentionBatch(tables, starts, lengths), lora, edges, sampled)


def _with_segment_tensors(lora: LoraBatch | None, tensors: Iterator[Tensor]) -> LoraBatch | None:
    return None if lora is None else LoraBatch(lora.tables, next(tensors), next(tensors))


def one_segment_per_sequence(batch: StepBatch) -> StepBatch:
    """Pad the segments to one per sequence, so that the kernels' block sizes do not depend on shared adapters.

    A batch with a single adapter keeps its one segment, so that the adapter's matrices are read once for all rows.
    """
    lora, sequences = batch.lora, len(batch.attention.context_lens)
    if lora is None or len(lora.segment_slots) == 1:
        return batch
    return replace(batch, lora=_with_segments(lora, sequences))


def padded(batch: StepBatch, sizes: PaddedSizes) -> StepBatch:
    """Pad a decode batch with rows that belong to no sequence. Attention skips them.

    The dense operators compute them, but the results are never read.
    """
    attention, rows = batch.attention, sizes.sequences
    tables = np.zeros((rows, sizes.blocks), np.int32)
    own = attention.block_tables.numpy()
    tables[: len(own), : own.shape[1]] = own
    lora = batch.lora
    if lora is not None and len(lora.segment_slots) > 1:
        lora = _with_segments(lora, rows)
    return StepBatch(
        token_ids=_pad(batch.token_ids, rows, 0),
        attention=AttentionBatch(
            _tensor(tables),
            _pad(attention.query_starts, rows + 1, len(own)),
            _pad(attention.context_lens, rows, 0),
        ),
        lora=lora,
        edges=None,
        sampled_rows=_tensor(np.arange(rows, dtype=np.int64)),
    )


def _with_segments(lora: LoraBatch, count: int) -> LoraBatch:
    end = int(lora.segments[-1])
    return LoraBatch(lora.tables, _pad(lora.segments, count + 1, end), _pad(lora.segment_slots, count, NO_SLOT))


def _pad(values: Tensor, length: int, filler: int) -> Tensor:
    array = values.numpy()
    return _tensor(np.concatenate((array, np.full(length - len(array), filler, array.dtype))))


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)
