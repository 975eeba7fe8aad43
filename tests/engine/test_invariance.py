"""A request's tokens and log-probabilities are bit-identical in every batch, schedule and chunking."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.config import DType
from engine.kernels import fallback, load_cpu_kernels
from tests.builders import lora_adapter, tiny_llama

# Skipped without a C++ compiler, except in CI, where a failed build must fail the tests.
pytestmark = pytest.mark.skipif(
    load_cpu_kernels() is fallback and "CI" not in os.environ, reason="torch's operators are not batch-invariant"
)

NUM_REQUESTS = 14


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    targets = ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head")
    plain = [lora_adapter(root / str(rank), model_dir, rank=rank, seed=rank) for rank in (2, 9, 33)]
    return [*plain, lora_adapter(root / "edges", model_dir, rank=5, targets=targets)]


def make_requests(vocabulary: int, names: list[str | None], new: int) -> list[Request]:
    """Some share prefixes, some adapters, some both."""
    rng = random.Random(5)
    roots = [[rng.randrange(3, vocabulary) for _ in range(60)] for _ in range(3)]
    requests = []
    for index in range(NUM_REQUESTS):
        prompt = roots[index % 3][: rng.choice([1, 17, 33, 60])] + [rng.randrange(3, vocabulary)] * rng.randrange(3)
        hot = {"temperature": 0.9, "seed": index} if index % 4 == 3 else {}
        sampling = SamplingParams(max_tokens=rng.randrange(1, new), logprobs=2, ignore_eos=True, **hot)  # type: ignore[arg-type]
        requests.append(Request(prompt_token_ids=prompt, adapter=names[index % len(names)], sampling=sampling))
    return requests


def observed(engine: Engine, requests: list[Request]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.error) for output in engine.generate(requests)]


class Case:
    """A model and the output of each request alone, computed once per dtype."""

    def __init__(self, model_dir: Path, adapters: list[Path]) -> None:
        self.model_dir, self.adapters = model_dir, adapters
        self.requests = make_requests(266, [None, *(str(i) for i in range(len(adapters)))], 24)
        self._alone: dict[DType, list[object]] = {}

    def engine(self, dtype: DType, **options: int) -> Engine:
        engine = Engine(EngineConfig(self.model_dir, dtype=dtype, threads=1, tokens_per_page=8, **options))  # type: ignore[arg-type]
        for index, adapter in enumerate(self.adapters):
            engine.load_adapter(str(index), adapter)
        return engine

    def alone(self, dtype: DType) -> list[object]:
        if dtype not in self._alone:
            engine = self.engine(dtype, prefix_cache=False)
            self._alone[dtype] = [observed(engine, [request])[0] for request in self.requests]
        return self._alone[dtype]


@pytest.fixture(scope="module")
def case(model_dir: Path, adapters: list[Path]) -> Case:
    return Case(model_dir, adapters)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(NUM_REQUESTS)),
    gaps=st.lists(st.integers(0, 3), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    prefix_cache=st.booleans(),
    batch=st.integers(1, 8),
    tokens=st.integers(8, 200),
    pages=st.integers(0, 60),
)
def test_any_schedule_gives_the_same(
    case: Case,
    order: list[int],
    gaps: list[int],
    dtype: DType,
    prefix_cache: bool,
    batch: int,
    tokens: int,
    pages: int,
) -> None:
    """Requests arrive at any time, with any token budget and pool size, preemption, eviction and shared blocks."""
    probe = case.engine(dtype)
    min_pages = max(probe._adapters[name].num_pages for name in probe._adapters) + 12
    engine = case.engine(
        dtype,
        prefix_cache=prefix_cache,
        max_batch_size=batch,
        max_batch_tokens=tokens,
        pool_bytes=(min_pages + pages) * probe._storage.bytes_per_page_id,
    )
    ids: dict[str, int] = {}
    results: dict[int, object] = {}

    def step() -> None:
        for output in engine.step():
            results[ids[output.request_id]] = (output.token_ids, output.logprobs, output.error)

    for index, gap in zip(order, gaps, strict=True):
        ids[engine.add(case.requests[index])] = index
        for _ in range(gap):
            step()
    while engine.has_work:
        step()
    assert [results[index] for index in range(NUM_REQUESTS)] == case.alone(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_is_batch_invariant(base_model_dir: Path, dtype: DType) -> None:
    """SmolLM2 in one mixed batch, chunked, preempted and with cached prefixes, compared with each request alone."""
    requests = make_requests(49_000, [None], 9)[:8]
    alone = Engine(EngineConfig(base_model_dir, dtype=dtype, threads=1, prefix_cache=False, pool_bytes=2**27))
    expected = [observed(alone, [request])[0] for request in requests]
    page = alone._storage.bytes_per_page_id
    tight = EngineConfig(
        base_model_dir, dtype=dtype, threads=1, max_batch_tokens=50, max_batch_size=6, pool_bytes=13 * page
    )
    engine = Engine(tight)
    assert observed(engine, requests) == expected
    assert observed(engine, requests[::-1]) == expected[::-1]
