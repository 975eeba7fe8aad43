"""From logits to tokens, for all rows of a step at once, each by its own parameters and nothing of the others.

choices_of    what the rows ask for, as arrays in host memory; these go to the device with the step's metadata
choose        tokens and log-probabilities, computed where the logits lie; nothing is read back on the way
read          the one result, back on the host
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import Kernels, Limits
from engine.scheduling.sequence import Sequence as Running
from engine.types import MAX_LOGPROBS, Sampled, SamplingParams

LARGEST_LOGIT = 1e30
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TOKEN, IS_FINITE, LOGPROB, LIKELIEST = 0, 1, 2, 3

Array = npt.NDArray[np.generic]
Values = TypeVar("Values")


class Choices(NamedTuple, Generic[Values]):
    """What the rows ask for, as arrays or as tensors; rows that take the likeliest token are in none of them.

    changed: int64 [m], rows of the logits. seen, counted: int64, places in the changed rows' logits laid end to end,
    no place twice; repetition and penalty: fp32, what these are divided (or multiplied) by and what is taken off.
    drawn: int64 [d], of the changed rows; temperature, min_p, uniform: fp64 [d]. restricted: int64 [r], of the drawn
    ones; top_k: int64, top_p: fp64 [r]. reported: int64, rows of the logits whose log-probabilities are asked for.
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


def sample(logits: Tensor, rows: Sequence[Running], kernels: Kernels) -> list[Sampled]:
    """Choose the next token of each row; logits fp32 (rows, vocabulary) in host memory are only read.

    A row whose logits are not finite is marked so and its token is meaningless.
    """
    choices = Choices(*(torch.from_numpy(array) for array in choices_of(rows, logits.shape[1])))
    return read(choose(logits, choices, kernels), rows)


def choices_of(rows: Sequence[Running], vocabulary: int) -> Choices[Array]:
    """What the rows of a step ask for."""
    changed = [index for index, row in enumerate(rows) if not _is_plain(row.sampling)]
    some = [rows[index] for index in changed]
    drawn = [index for index, row in enumerate(some) if row.sampling.temperature > 0]
    params = [some[index].sampling for index in drawn]
    restricted = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    return Choices(
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
    """True when the likeliest token of the raw logits is the one."""
    is_penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return not (p.temperature > 0 or is_penalised)


def _ids(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)


def _seen(rows: Sequence[Running], vocabulary: int) -> tuple[Array, Array]:
    """Repetition counts the prompt's tokens too: (places, what they are divided by)."""
    places, penalties = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for index, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            tokens = np.unique(np.array([*row.prompt_ids, *row.output_ids], np.int64))
            places.append(index * vocabulary + tokens)
            penalties.append(np.full(len(tokens), row.sampling.repetition_penalty, np.float32))
    return np.concatenate(places), np.concatenate(penalties)


def _counted(rows: Sequence[Running], vocabulary: int) -> tuple[Array, Array]:
    """Presence and frequency count generated tokens: (places, what is taken off)."""
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
    """Numbers in a row of `choose`'s result."""
    return LIKELIEST + 2 * min(MAX_LOGPROBS, vocabulary)


def choose(logits: Tensor, choices: Choices[Tensor], kernels: Kernels) -> Tensor:
    """fp64 [rows, 3 + 2 n]: token, whether it means anything, its log-probability, the likeliest n and theirs.

    Log-probabilities are of the raw logits; they are there for the rows that ask for them.
    """
    largest, logsumexp = kernels.logit_stats(logits)
    if len(choices.changed):
        chosen = _choose(torch.index_select(logits, 0, choices.changed), choices, kernels)
        largest = largest.index_copy(0, choices.changed, chosen)
    result = torch.zeros(len(logits), result_size(logits.shape[1]), dtype=torch.float64, device=logits.device)
    result[:, TOKEN] = largest
    result[:, IS_FINITE] = torch.isfinite(logsumexp)
    if len(choices.reported):
        _report(result, logits, largest, logsumexp, choices.reported)
    return result


def _choose(logits: Tensor, choices: Choices[Tensor], kernels: Kernels) -> Tensor:
    """Tokens by penalties and temperature; logits are overwritten."""
    apply_penalties(logits, choices)
    tokens, _ = kernels.logit_stats(logits)
    if len(choices.drawn) == 0:
        return tokens
    limits = Limits(
        *(choices.temperature, choices.min_p, choices.uniform, choices.restricted, choices.top_k, choices.top_p)
    )
    drawn = kernels.draw(torch.index_select(logits, 0, choices.drawn), limits)
    return tokens.index_copy(0, choices.drawn, drawn)


def apply_penalties(logits: Tensor, choices: Choices[Tensor]) -> None:
    """In place on the changed rows."""
    flat = logits.view(-1)
    if len(choices.seen):
        values, by = flat[choices.seen], choices.repetition
        values = torch.where(values > 0, values / by, values * by)
        flat.index_copy_(0, choices.seen, values.clamp(-LARGEST_LOGIT, LARGEST_LOGIT))
    if len(choices.counted):
        flat.index_copy_(0, choices.counted, flat[choices.counted] - choices.penalty)


def _report(result: Tensor, logits: Tensor, tokens: Tensor, logsumexp: Tensor, rows: Tensor) -> None:
    """As many of the likeliest for every row as any may ask for, so that a row's do not depend on the others."""
    some, total = torch.index_select(logits, 0, rows), torch.index_select(logsumexp, 0, rows)[:, None]
    top = torch.topk(some, min(MAX_LOGPROBS, logits.shape[1]))
    own = some.gather(1, torch.index_select(tokens, 0, rows)[:, None]) - total
    reported = torch.cat((own.double(), top.indices.double(), (top.values - total).double()), dim=1)
    result[:, LOGPROB:].index_copy_(0, rows, reported)


def read(result: Tensor, rows: Sequence[Running]) -> list[Sampled]:
    """The result of `choose`, in host memory, as the rows' tokens."""
    return [_read(values, row.sampling.logprobs) for values, row in zip(result.tolist(), rows, strict=True)]


def _read(values: list[Any], count: int | None) -> Sampled:
    token, middle = int(values[TOKEN]), (LIKELIEST + len(values)) // 2
    logprobs = None
    if count is not None:
        likeliest = zip(values[LIKELIEST : LIKELIEST + count], values[middle : middle + count], strict=True)
        logprobs = {token: values[LOGPROB]} | {int(other): value for other, value in likeliest}
    return Sampled(token, logprobs, bool(values[IS_FINITE]))


def _uniforms(rows: Sequence[Running]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, made of its seed and its number of tokens so far alone (SplitMix64).

    52 bits, so that its product with any sum stays below that sum.
    """
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    counts = np.array([len(row.output_ids) for row in rows], dtype=np.uint64)
    state = _mix(seeds + GOLDEN) + (counts + np.uint64(1)) * GOLDEN
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
