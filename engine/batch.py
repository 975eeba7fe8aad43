"""StepBatch: all that the forward pass needs to know of a step, built once for all layers."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from engine.lora.batch import Segment, segments
from engine.lora.weights import AdapterWeights
from engine.memory.kv import Ints, KvCache
from engine.scheduler import Slice
from engine.types import PageId


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences that attend together: the same number of queries each, keys padded to the longest.

    `tokens` (sequences · queries) are their rows of the step. `starts` and `ends` (sequences) bound the positions of
    their queries, so that a mask can be made for any window. `causal` says that queries and keys are the same tokens.
    """

    tokens: torch.Tensor
    num_sequences: int
    num_queries: int
    num_keys: int
    causal: bool
    read_index: torch.Tensor
    query_positions: torch.Tensor

    def mask(self, window: int | None) -> torch.Tensor | None:
        """True where query (sequence, 1, query, key) may look; None when the causal flag says it all."""
        if self.causal and (window is None or window >= self.num_keys):
            return None
        queries = self.query_positions.view(self.num_sequences, 1, self.num_queries, 1)
        keys = torch.arange(self.num_keys, device=queries.device)
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of a step in the plan's order, whose neighbours share an adapter.

    `token_ids` and `positions` are (tokens); `last_rows` are the rows whose next token is sampled, in plan order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_index: torch.Tensor
    groups: tuple[AttentionGroup, ...]
    segments: tuple[Segment, ...]
    last_rows: torch.Tensor
    last_segments: tuple[Segment, ...]


def build_batch(
    plan: Many[Slice],
    pages_of: Callable[[Slice], Many[PageId]],
    adapter_of: Callable[[Slice], AdapterWeights | None],
    kv: KvCache,
    device: torch.device,
) -> StepBatch:
    """Lay out a plan and clear the pages that it begins to fill."""
    tables = [np.asarray(pages_of(part), dtype=np.int64) for part in plan]
    starts = np.array([part.sequence.num_computed for part in plan])
    counts = np.array([part.num_tokens for part in plan])
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    kv.clear(_begun_pages(tables, starts, starts + counts, kv.tokens_per_page))
    flat = np.concatenate(positions)
    pages = np.concatenate([table[at // kv.tokens_per_page] for table, at in zip(tables, positions, strict=True)])
    token_ids = [i for part, at in zip(plan, positions, strict=True) for i in _token_ids(part, at)]
    is_last = np.array([part.is_last for part in plan])
    adapters = [adapter_of(part) for part in plan]
    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.from_numpy(flat).to(device),
        write_index=kv.write_index(pages, flat % kv.tokens_per_page),
        groups=tuple(_groups(tables, starts, counts, kv, device)),
        segments=segments(zip(adapters, counts.tolist(), strict=True)),
        last_rows=torch.from_numpy((np.cumsum(counts) - 1)[is_last]).to(device),
        last_segments=segments(zip(adapters, is_last.astype(int).tolist(), strict=True)),
    )


def _token_ids(part: Slice, positions: Ints) -> list[int]:
    return part.sequence.tokens(int(positions[0]), int(positions[-1]) + 1)


def _begun_pages(tables: list[Ints], starts: Ints, ends: Ints, tokens_per_page: int) -> list[int]:
    """Pages whose first slot is written now and whose last one is not."""
    begun = []
    for table, start, end in zip(tables, starts, ends, strict=True):
        page = (end - 1) // tokens_per_page
        if end % tokens_per_page and page * tokens_per_page >= start:
            begun.append(int(table[page]))
    return begun


def _groups(tables: list[Ints], starts: Ints, counts: Ints, kv: KvCache, device: torch.device) -> list[AttentionGroup]:
    """One group for all single tokens, and one for each pair of chunk length and context."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        members.setdefault((count, -1 if count == 1 else start), []).append(index)
    rows = np.cumsum(counts) - counts
    return [_group(indexes, tables, starts, rows, count, kv, device) for (count, _), indexes in members.items()]


def _group(
    indexes: list[int], tables: list[Ints], starts: Ints, rows: Ints, count: int, kv: KvCache, device: torch.device
) -> AttentionGroup:
    num_keys = int(starts[indexes].max()) + count
    num_pages = -(-num_keys // kv.tokens_per_page)
    table = np.stack([_padded(tables[index], num_pages) for index in indexes])
    queries = np.arange(count)
    return AttentionGroup(
        tokens=torch.from_numpy((rows[indexes][:, None] + queries).reshape(-1)).to(device),
        num_sequences=len(indexes),
        num_queries=count,
        num_keys=num_keys,
        causal=count == num_keys,
        read_index=kv.read_index(table),
        query_positions=torch.from_numpy(starts[indexes][:, None] + queries).to(device),
    )


def _padded(table: Ints, num_pages: int) -> Ints:
    """The first pages of a table, its first one repeated past its end: masked, but finite and the sequence's own."""
    return np.pad(table[:num_pages], (0, max(num_pages - len(table), 0)), constant_values=table[0])
