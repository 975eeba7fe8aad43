"""Each row is sampled by its own parameters and is independent of the rest of the batch."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from engine import SamplingParams
from engine.kernels import load_cpu_kernels
from engine.scheduling.sequence import Sequence
from engine.step.sampling import SamplingBatch, apply_penalties, build_sampling_batch, sample
from engine.types import RequestId, Sampled

VOCABULARY = 50


def row(
    sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), seed: int = 0
) -> Sequence:
    return Sequence(RequestId("r"), prompt, sampling, None, seed, list(output))


def draw(values: torch.Tensor, rows: list[Sequence]) -> list[Sampled]:
    return sample(values, rows, load_cpu_kernels())


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def tokens(values: torch.Tensor, rows: list[Sequence]) -> list[int]:
    return [sampled.token_id for sampled in draw(values.clone(), rows)]


def test_greedy_takes_the_most_likely_token() -> None:
    values = logits(5)
    assert tokens(values, [row(SamplingParams())] * 5) == values.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_the_strictest_limits_leave_the_most_likely_token(sampling: dict[str, float]) -> None:
    values = logits(30)
    rows = [row(SamplingParams(**({"temperature": 1.0} | sampling)), seed=i) for i in range(30)]  # type: ignore[arg-type]
    assert tokens(values, rows) == values.argmax(-1).tolist()


MIX = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, presence_penalty=1.0, frequency_penalty=-0.5),
    SamplingParams(presence_penalty=2.0, logprobs=3),
    SamplingParams(temperature=5.0, top_k=10**12),
]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-45},
        {"temperature": 1.0, "repetition_penalty": 1e-308},
        {"temperature": 10.0, "repetition_penalty": 10.0, "top_p": 1e-300, "min_p": 1.0},
    ],
)
def test_extreme_parameters_still_yield_a_token(sampling: dict[str, float]) -> None:
    rows = [row(SamplingParams(**sampling), tuple(range(VOCABULARY)), seed=i) for i in range(20)]  # type: ignore[arg-type]
    assert all(0 <= token < VOCABULARY for token in tokens(logits(20), rows))


def test_a_row_is_sampled_the_same_in_any_batch() -> None:
    values = logits(len(MIX))
    rows = [row(p, output=(3, 3, 4), seed=100 + i) for i, p in enumerate(MIX)]
    together = draw(values.clone(), rows)
    for order in (list(reversed(range(len(MIX)))), [4, 1, 8], [6]):
        again = draw(values[order].clone(), [rows[i] for i in order])
        assert again == [together[i] for i in order]
    for index, sampled in enumerate(together):
        assert draw(values[[index]].clone(), [rows[index]]) == [sampled]


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    values = logits(1)
    rows = [row(SamplingParams(temperature=1.5), seed=i) for i in range(count)]
    drawn = torch.tensor(tokens(values.expand(count, -1), rows))
    observed = torch.bincount(drawn, minlength=VOCABULARY).double()
    expected = torch.softmax(values[0].double() / 1.5, -1) * count
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 110  # 49 degrees of freedom; the seeds are fixed


def test_successive_tokens_of_one_seed_are_independent() -> None:
    values = torch.zeros(1, 2)
    drawn = [tokens(values, [row(SamplingParams(temperature=1.0), output=(0,) * n)])[0] for n in range(2000)]
    changes = sum(a != b for a, b in itertools.pairwise(drawn))
    assert abs(sum(drawn) - 1000) < 120
    assert abs(changes - 1000) < 120


def allowed(values: torch.Tensor, sampling: SamplingParams) -> set[int]:
    rows = [row(sampling, seed=i) for i in range(4000)]
    return set(tokens(values.expand(4000, -1), rows))


def test_limits_keep_exactly_the_right_tokens() -> None:
    values = torch.log(torch.tensor([[0.05, 0.4, 0.1, 0.25, 0.2]]))
    hot = SamplingParams(temperature=1.0)
    assert allowed(values, replace(hot, top_k=2)) == {1, 3}
    assert allowed(values, replace(hot, top_p=0.64)) == {1, 3}
    assert allowed(values, replace(hot, top_p=0.66)) == {1, 3, 4}
    assert allowed(values, replace(hot, min_p=0.3)) == {1, 3, 4}
    assert allowed(values, replace(hot, top_k=3, top_p=0.7)) == {1, 3}  # top_p applies to what top_k leaves
    assert allowed(values, hot) == {0, 1, 2, 3, 4}


def test_penalties_follow_their_definition() -> None:
    values = logits(1)
    rows = [
        row(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5), (1, 2), (3, 3, 4))
    ]
    expected = values.clone()
    for token in (1, 2, 3, 4):
        expected[0, token] *= 1.5 if expected[0, token] < 0 else 1 / 1.5
    expected[0, 3] -= 0.5 + 2 * 0.25
    expected[0, 4] -= 0.5 + 0.25
    changed = values.clone()
    choices = build_sampling_batch(rows, VOCABULARY)
    assert choices.changed.tolist() == list(range(len(rows)))
    apply_penalties(changed, SamplingBatch(*(torch.from_numpy(array) for array in choices)))
    torch.testing.assert_close(changed, expected)


def test_logprobs_are_of_the_raw_logits() -> None:
    values = logits(2)
    rows = [
        row(SamplingParams(temperature=3.0, top_k=40, repetition_penalty=2.0, logprobs=4), output=(7,), seed=5),
        row(SamplingParams(logprobs=0)),
    ]
    truth = torch.log_softmax(values, -1)
    first, second = draw(values.clone(), rows)
    assert first.logprobs is not None
    assert second.logprobs is not None
    top = truth[0].topk(4).indices.tolist()
    assert set(first.logprobs) == {first.token_id, *top}
    assert list(second.logprobs) == [second.token_id]
    for token, value in first.logprobs.items():
        assert math.isclose(value, float(truth[0, token]), abs_tol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_marked_and_affects_no_other(bad: float) -> None:
    values = logits(3)
    rows = [row(SamplingParams(temperature=1.0), seed=i) for i in range(3)]
    expected = tokens(values, rows)
    values[1, 7] = bad
    marked = draw(values.clone(), rows)
    assert [sampled.finite for sampled in marked] == [True, False, True]
    assert [marked[0].token_id, marked[2].token_id] == [expected[0], expected[2]]
