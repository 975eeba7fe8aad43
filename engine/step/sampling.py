"""Samples the rows of a step together; each row's token depends only on its own logits and parameters.

build_sampling_batch  collects the rows' parameters as arrays in host memory, sent along with the step's metadata
sample_batch          computes tokens and log-probabilities where the logits are, without reading anything back
read_result           converts the result, once it is in host memory
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import Kernels, Limits
from engine.scheduling.sequence import Sequence as ScheduledSequence
from engine.types import MAX_LOGPROBS, Sampled, SamplingParams

MAX_LOGIT = 1e30
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TOKEN, IS_FINITE, LOGPROB, TOP = 0, 1, 2, 3

Array = npt.NDArray[np.generic]
Values = TypeVar("Values")


class SamplingBatch(NamedTuple, Generic[Values]):
    """The rows' sampling parameters, as arrays or tensors. Plain greedy rows appear only in `reported`.

    changed: int64 [m], rows with penalties or a temperature. seen, counted: int64, unique indices into the flattened
    logits of the changed rows; repetition, penalty: fp32, the repetition penalty of each seen token and the value to
    subtract for each counted token. drawn: int64 [d], indices into changed; temperature, min_p, uniform: fp64 [d].
    restricted: int64 [r], indices into drawn; top_k: int64 [r], top_p: fp64 [r]. reported: int64, rows that report
    log-probabilities.
    """

    changed: Values
    seen: Values
    repetition: Values
    counted: Values
    penalty: Values
    drawn: Values
    temperature: Values
    min_p: Values
    uniform: Values
    restricted: Values
    top_k: Values
    top_p: Values
    reported: Values


def sample(logits: Tensor, rows: Sequence[ScheduledSequence], kernels: Kernels) -> list[Sampled]:
    """Sample the next token of each row from logits in host memory, fp32 (rows, vocabulary), which are not modified.

    A row with logits that are not finite has `finite` false and a meaningless token.
    """
    batch = SamplingBatch(*(torch.from_numpy(array) for array in build_sampling_batch(rows, logits.shape[1])))
    return read_result(sample_batch(logits, batch, kernels), rows)


def build_sampling_batch(rows: Sequence[ScheduledSequence], vocabulary: int) -> SamplingBatch[Array]:
    """Collect the sampling parameters of a step's rows."""
    changed = [index for index, row in enumerate(rows) if not _is_plain(row.sampling)]
    some = [rows[index] for index in changed]
    drawn = [index for index, row in enumerate(some) if row.sampling.temperature > 0]
    params = [some[index].sampling for index in drawn]
    restricted = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    return SamplingBatch(
        _ids(changed),
        *_seen(some, vocabulary),
        *_counted(some, vocabulary),
        _ids(drawn),
        np.array([p.temperature for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        _uniforms([some[index] for index in drawn]),
        _ids(restricted),
        _ids([min(params[index].top_k or vocabulary, vocabulary) for index in restricted]),
        np.array([params[index].top_p for index in restricted], np.float64),
        _ids([index for index, row in enumerate(rows) if row.sampling.logprobs is not None]),
    )


def _is_plain(p: SamplingParams) -> bool:
    """True if the row takes the most likely token of the raw logits."""
    is_penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return not (p.temperature > 0 or is_penalised)


def _ids(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)


def _seen(rows: Sequence[ScheduledSequence], vocabulary: int) -> tuple[Array, Array]:
    """Tokens of the prompt and the output that the repetition penalty applies to: (indices, penalties)."""
    places, penalties = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for index, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            tokens = np.unique(np.array([*row.prompt_ids, *row.output_ids], np.int64))
            places.append(index * vocabulary + tokens)
            penalties.append(np.full(len(tokens), row.sampling.repetition_penalty, np.float32))
    return np.concatenate(places), np.concatenate(penalties)


def _counted(rows: Sequence[ScheduledSequence], vocabulary: int) -> tuple[Array, Array]:
    """Generated tokens that presence and frequency penalties apply to: (indices, values to subtract)."""
    places, penalties = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for index, row in enumerate(rows):
        p = row.sampling
        if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
            tokens, counts = np.unique(np.array(row.output_ids, np.int64), return_counts=True)
            places.append(index * vocabulary + tokens)
            penalties.append(
                np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts.astype(np.float32)
            )
    return np.concatenate(places), np.concatenate(penalties)


def result_size(vocabulary: int) -> int:
    """Number of values in a row of `sample_batch`'s result."""
    return TOP + 2 * min(MAX_LOGPROBS, vocabulary)


def sample_batch(logits: Tensor, batch: SamplingBatch[Tensor], kernels: Kernels) -> Tensor:
    """Sample all rows; returns fp64 [rows, 3 + 2 n].

    A row has the token, whether its logits are finite, the token's log-probability, the n most likely tokens and their
    log-probabilities. Log-probabilities are of the raw logits and are set only in rows that report them.
    """
    largest, logsumexp = kernels.logit_stats(logits)
    if len(batch.changed):
        chosen = _sample_changed(torch.index_select(logits, 0, batch.changed), batch, kernels)
        largest = largest.index_copy(0, batch.changed, chosen)
    result = torch.zeros(len(logits), result_size(logits.shape[1]), dtype=torch.float64, device=logits.device)
    result[:, TOKEN] = largest
    result[:, IS_FINITE] = torch.isfinite(logsumexp)
    if len(batch.reported):
        _report(result, logits, largest, logsumexp, batch.reported)
    return result


def _sample_changed(logits: Tensor, batch: SamplingBatch[Tensor], kernels: Kernels) -> Tensor:
    """Sample the rows with penalties or a temperature; overwrites their logits."""
    apply_penalties(logits, batch)
    tokens, _ = kernels.logit_stats(logits)
    if len(batch.drawn) == 0:
        return tokens
    limits = Limits(*(batch.temperature, batch.min_p, batch.uniform, batch.restricted, batch.top_k, batch.top_p))
    drawn = kernels.draw(torch.index_select(logits, 0, batch.drawn), limits)
    return tokens.index_copy(0, batch.drawn, drawn)


def apply_penalties(logits: Tensor, batch: SamplingBatch[Tensor]) -> None:
    """Apply all penalties to the changed rows' logits, in place."""
    flat = logits.view(-1)
    if len(batch.seen):
        values, by = flat[batch.seen], batch.repetition
        values = torch.where(values > 0, values / by, values * by)
        flat.index_copy_(0, batch.seen, values.clamp(-MAX_LOGIT, MAX_LOGIT))
    if len(batch.counted):
        flat.index_copy_(0, batch.counted, flat[batch.counted] - batch.penalty)


def _report(result: Tensor, logits: Tensor, tokens: Tensor, logsumexp: Tensor, rows: Tensor) -> None:
    """Write log-probabilities of `MAX_LOGPROBS` tokens for every reported row, so that no row depends on the others."""
    some, total = torch.index_select(logits, 0, rows), torch.index_select(logsumexp, 0, rows)[:, None]
    top = torch.topk(some, min(MAX_LOGPROBS, logits.shape[1]))
    own = some.gather(1, torch.index_select(tokens, 0, rows)[:, None]) - total
    reported = torch.cat((own.double(), top.indices.double(), (top.values - total).double()), dim=1)
    result[:, LOGPROB:].index_copy_(0, rows, reported)


def read_result(result: Tensor, rows: Sequence[ScheduledSequence]) -> list[Sampled]:
    """Convert the result of `sample_batch`, in host memory, to sampled tokens."""
    return [_read_row(values, row.sampling.logprobs) for values, row in zip(result.tolist(), rows, strict=True)]


def _read_row(values: list[Any], count: int | None) -> Sampled:
    token, middle = int(values[TOKEN]), (TOP + len(values)) // 2
    logprobs = None
    if count is not None:
        top = zip(values[TOP : TOP + count], values[middle : middle + count], strict=True)
        logprobs = {token: values[LOGPROB]} | {int(other): value for other, value in top}
    return Sampled(token, logprobs, bool(values[IS_FINITE]))


def _uniforms(rows: Sequence[ScheduledSequence]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of its seed and its number of generated tokens only (SplitMix64).

    It has 52 bits, so that its product with any sum stays below that sum.
    """
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    counts = np.array([len(row.output_ids) for row in rows], dtype=np.uint64)
    state = _mix(seeds + GOLDEN) + (counts + np.uint64(1)) * GOLDEN
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
