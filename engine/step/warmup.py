"""Steps that compute nothing of use: a device compiles, sizes and records in them what it would otherwise in a job's.

Decode steps of every recorded number of rows at short contexts, and prefills of the largest step, each without
adapters, with one and with several: tables without adapters make the kernels leave at once, but compile all the same.
Left for their first use are longer contexts' recordings, and adapters on the embedding or the head.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.kernels import AttentionBatch, LoraBatch, LoraTables
from engine.model.batch import StepBatch
from engine.scheduling.sequence import Sequence
from engine.step.graphs import batch_buckets
from engine.types import PageId, RequestId, SamplingParams

PREFILLS = (1, 2)
"""Sequences of a prefill step: kernels choose other blocks by the mean length of what they are given."""

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=0.8, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=0, logprobs=1),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5),
)


@dataclass(frozen=True, slots=True)
class Extent:
    """Of a step: sequences, tokens, and the tokens of one sequence, at most; tokens of a page."""

    sequences: int
    tokens: int
    length: int
    tokens_per_page: int


def idle_steps(extent: Extent, tables: LoraTables, page: PageId) -> Iterator[tuple[StepBatch, list[Sequence]]]:
    """The steps and whose tokens are sampled in each. All of them write to one page, and any slot's adapter will do."""
    turns = itertools.count()
    for num_adapters in (0, 1, 2):
        for count in batch_buckets(extent.sequences):
            if num_adapters <= count:
                yield _step(count, 1, tables, num_adapters, page, extent), _sampled(count, next(turns))
        for count in PREFILLS:
            length = min(extent.tokens // count, extent.length)
            if num_adapters <= count <= extent.sequences and length > 1:
                yield _step(count, length, tables, num_adapters, page, extent), _sampled(count, next(turns))


def _step(count: int, length: int, tables: LoraTables, num_adapters: int, page: PageId, extent: Extent) -> StepBatch:
    """`count` sequences of `length` tokens each; one adapter is that of all rows, several are one each."""
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    lora = None
    if num_adapters:
        segments = ends if num_adapters > 1 else ends[[0, -1]]
        lora = LoraBatch(tables, segments, torch.zeros(len(segments) - 1, dtype=torch.int32))
    blocks = -(-length // extent.tokens_per_page)
    attention = AttentionBatch(
        block_tables=torch.full((count, blocks), page, dtype=torch.int32),
        query_starts=ends,
        context_lens=torch.full((count,), length, dtype=torch.int32),
    )
    return StepBatch(torch.zeros(count * length, dtype=torch.int64), attention, lora, None, ends[1:].long() - 1)


def _sampled(count: int, turn: int) -> list[Sequence]:
    """Sequences that ask for the kinds of sampling in turn: few of them, for others in the next step."""
    kinds = [SAMPLINGS[(row + turn) % len(SAMPLINGS)] for row in range(count)]
    return [Sequence(RequestId(f"warm-up {row}"), (0,), kind, None, 0) for row, kind in enumerate(kinds)]
