"""From logits to tokens, for all rows of a step at once, each by its own parameters and nothing of the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels import Kernels
from engine.sequence import Sequence as Running
from engine.types import SamplingParams

LARGEST_LOGIT = 1e30
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of a row, and with `logprobs` asked for those of it and of the likeliest ones."""

    token_id: int
    logprobs: dict[int, float] | None
    finite: bool


def sample(logits: torch.Tensor, rows: Sequence[Running], kernels: Kernels) -> list[Sampled]:
    """Choose the next token of each row; logits fp32 (rows, vocabulary) are only read.

    A row whose logits are not finite is marked so and its token is meaningless.
    """
    largest, logsumexp = kernels.logit_stats(logits)
    tokens, finite = largest.tolist(), torch.isfinite(logsumexp).tolist()
    changed = [index for index, row in enumerate(rows) if not _is_plain(row.sampling)]
    if changed:
        chosen = _choose(logits[changed], [rows[index] for index in changed])
        for index, token in zip(changed, chosen, strict=True):
            tokens[index] = token
    return [
        Sampled(token, _logprobs(logits[index], logsumexp[index], token, row.sampling.logprobs), ok)
        for index, (token, ok, row) in enumerate(zip(tokens, finite, rows, strict=True))
    ]


def _is_plain(p: SamplingParams) -> bool:
    """True when the likeliest token of the raw logits is the one."""
    is_penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    return not (p.temperature > 0 or is_penalised)


def _logprobs(row: torch.Tensor, logsumexp: torch.Tensor, token: int, count: int | None) -> dict[int, float] | None:
    """Log-probabilities of the token and of the `count` likeliest, from raw logits."""
    if count is None:
        return None
    top = torch.topk(row, count)
    likeliest = dict(zip(top.indices.tolist(), (top.values - logsumexp).tolist(), strict=True))
    return {token: float(row[token] - logsumexp)} | likeliest


def _choose(logits: torch.Tensor, rows: Sequence[Running]) -> list[int]:
    """Tokens by penalties and temperature; logits may be overwritten."""
    _apply_penalties(logits, rows)
    tokens = logits.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        params = [rows[index].sampling for index in drawn]
        exact = logits[drawn].double()
        exact -= exact.amax(dim=-1, keepdim=True)  # so that the least temperature leaves the likeliest token at 0
        scaled = exact / _column([p.temperature for p in params], exact)
        uniform = torch.from_numpy(_uniforms([rows[index] for index in drawn])).to(logits.device)
        tokens[drawn] = _draw(scaled, params, uniform)
    chosen: list[int] = tokens.tolist()
    return chosen


def _apply_penalties(logits: torch.Tensor, rows: Sequence[Running]) -> None:
    """Presence and frequency count generated tokens, repetition counts the prompt's too; in place."""
    for index, row in enumerate(rows):
        p = row.sampling
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device)
            values = logits[index, seen]
            values = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
            logits[index, seen] = values.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
        if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
            tokens, counts = np.unique(np.asarray(row.output_ids), return_counts=True)
            penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(logits)
            logits[index, torch.from_numpy(tokens).to(logits.device)] -= penalty


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution, in order of token ids, at one uniform number per row."""
    restricted = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if restricted:
        logits[restricted] = _restrict(logits[restricted], [params[i] for i in restricted])
    probabilities = torch.softmax(logits.double(), dim=-1)
    least = _column([p.min_p for p in params], probabilities) * probabilities.amax(dim=-1, keepdim=True)
    probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _restrict(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Leave the top_k likeliest tokens, and of these the fewest whose share reaches top_p; the rest become -inf."""
    size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(size, device=logits.device)
    ordered.masked_fill_(ranks >= _column([min(p.top_k or size, size) for p in params], ranks), -torch.inf)
    probabilities = torch.softmax(ordered.double(), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    cut = before >= _column([p.top_p for p in params], before)
    cut[:, 0] = False
    ordered.masked_fill_(cut, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _uniforms(rows: Sequence[Running]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One number in [0, 1) per row, made of its seed and its number of tokens so far alone (SplitMix64).

    52 bits, so that its product with any sum stays below that sum.
    """
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    counts = np.array([len(row.output_ids) for row in rows], dtype=np.uint64)
    state = _mix(seeds + GOLDEN) + (counts + np.uint64(1)) * GOLDEN
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
