"""Warm-up steps, which make a device compile kernels, allocate memory and record graphs before the first request.

They are decode steps with every recorded number of rows at short contexts, and prefills of the largest step; each
without adapters, with one and with several. With empty tables the kernels return immediately, but are compiled. Not
covered, and done on first use: recordings for longer contexts, and adapters on the embedding or the head.
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
"""Numbers of sequences in prefill steps: the kernels' block sizes depend on the mean length of the sequences."""

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=0.8, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=0, logprobs=1),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5),
)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most sequences, tokens, and tokens of one sequence that a step can have; and the tokens per page."""

    sequences: int
    tokens: int
    length: int
    tokens_per_page: int


def warmup_steps(limits: StepLimits, tables: LoraTables, page: PageId) -> Iterator[tuple[StepBatch, list[Sequence]]]:
    """Yield steps and the sequences sampled in each. All steps write to one page and use the adapter of slot 0."""
    turns = itertools.count()
    for num_adapters in (0, 1, 2):
        for count in batch_buckets(limits.sequences):
            if num_adapters <= count:
                yield _step(count, 1, tables, num_adapters, page, limits), _sampled(count, next(turns))
        for count in PREFILLS:
            length = min(limits.tokens // count, limits.length)
            if num_adapters <= count <= limits.sequences and length > 1:
                yield _step(count, length, tables, num_adapters, page, limits), _sampled(count, next(turns))


def _step(
    count: int, length: int, tables: LoraTables, num_adapters: int, page: PageId, limits: StepLimits
) -> StepBatch:
    """`count` sequences of `length` tokens each, all in one segment for one adapter, else in one segment each."""
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    lora = None
    if num_adapters:
        segments = ends if num_adapters > 1 else ends[[0, -1]]
        lora = LoraBatch(tables, segments, torch.zeros(len(segments) - 1, dtype=torch.int32))
    blocks = -(-length // limits.tokens_per_page)
    attention = AttentionBatch(
        block_tables=torch.full((count, blocks), page, dtype=torch.int32),
        query_starts=ends,
        context_lens=torch.full((count,), length, dtype=torch.int32),
    )
    return StepBatch(torch.zeros(count * length, dtype=torch.int64), attention, lora, None, ends[1:].long() - 1)


def _sampled(count: int, turn: int) -> list[Sequence]:
    """Sequences that rotate through the sampling modes, starting at another one in each step."""
    kinds = [SAMPLINGS[(row + turn) % len(SAMPLINGS)] for row in range(count)]
    return [Sequence(RequestId(f"warm-up {row}"), (0,), kind, None, 0) for row, kind in enumerate(kinds)]
