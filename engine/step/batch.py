"""Builds a StepBatch from a plan, once for all layers, with numpy."""

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import AttentionBatch, LoraBatch
from engine.lora.edges import EdgeBatch, EmbeddingRows
from engine.lora.store import LoadedAdapter
from engine.lora.tables import SlotTables
from engine.model.batch import NO_SLOT, StepBatch
from engine.scheduling.scheduler import Slice

Ids = npt.NDArray[np.int64]


def build_batch(
    plan: Many[Slice], adapter_of: Callable[[Slice], LoadedAdapter | None], tables: SlotTables
) -> StepBatch:
    """Build the batch of a plan whose slices are ordered by adapter."""
    starts = np.array([part.sequence.num_computed for part in plan], np.int32)
    counts = np.array([part.num_tokens for part in plan], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    adapters = [adapter_of(part) for part in plan]
    sampled = np.array([part.is_last for part in plan])
    return StepBatch(
        token_ids=torch.from_numpy(_token_ids(plan)),
        attention=AttentionBatch(
            block_tables=torch.from_numpy(_block_tables(plan)),
            query_starts=torch.from_numpy(_prepend_zero(ends)),
            context_lens=torch.from_numpy(starts + counts),
        ),
        lora=_lora(adapters, ends, tables) if any(adapter is not None for adapter in adapters) else None,
        edges=_edges(adapters, ends, sampled, tables),
        sampled_rows=torch.from_numpy(ends[sampled].astype(np.int64) - 1),
    )


def _token_ids(plan: Many[Slice]) -> Ids:
    ids: list[int] = []
    for part in plan:
        start = part.sequence.num_computed
        ids.extend(part.sequence.tokens(start, start + part.num_tokens))
    return np.array(ids, np.int64)


def _block_tables(plan: Many[Slice]) -> npt.NDArray[np.int32]:
    table = np.zeros((len(plan), max(len(part.sequence.pages) for part in plan)), np.int32)
    for row, part in zip(table, plan, strict=True):
        pages = part.sequence.pages
        row[: len(pages)] = pages
    return table


def _prepend_zero(ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate((np.zeros(1, np.int32), ends))


def _lora(adapters: Many[LoadedAdapter | None], ends: npt.NDArray[np.int32], tables: SlotTables) -> LoraBatch:
    segments, slots = _segments([NO_SLOT if adapter is None else adapter.slot for adapter in adapters], ends)
    return LoraBatch(tables.layers, segments, slots)


def _segments(slots: list[int], ends: npt.NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge adjacent rows of one slot into a segment: the segments' bounds and their slots."""
    last = [index for index, slot in enumerate(slots) if index + 1 == len(slots) or slots[index + 1] != slot]
    segment_slots = np.array([slots[index] for index in last], np.int32)
    return torch.from_numpy(_prepend_zero(ends[last])), torch.from_numpy(segment_slots)


def _edges(
    adapters: Many[LoadedAdapter | None],
    ends: npt.NDArray[np.int32],
    sampled: npt.NDArray[np.bool_],
    tables: SlotTables,
) -> EdgeBatch | None:
    layouts = [None if adapter is None else adapter.layout for adapter in adapters]
    if not any(layout is not None and (layout.has_head or layout.embedding_rank) for layout in layouts):
        return None
    embedding = tuple(
        EmbeddingRows(start, end, adapter.slot, adapter.layout.embedding_rank)
        for start, end, adapter in zip(_prepend_zero(ends).tolist(), ends.tolist(), adapters, strict=False)
        if adapter is not None and adapter.layout.embedding_rank
    )
    rows = [adapter for adapter, is_sampled in zip(adapters, sampled.tolist(), strict=True) if is_sampled]
    slots = [adapter.slot if adapter is not None and adapter.layout.has_head else NO_SLOT for adapter in rows]
    if all(slot == NO_SLOT for slot in slots):
        return EdgeBatch(embedding, None)
    segments, segment_slots = _segments(slots, np.arange(1, len(slots) + 1, dtype=np.int32))
    return EdgeBatch(embedding, LoraBatch(tables.edges, segments, segment_slots))
