"""The prefix cache: which requests share blocks, and what `cached_tokens` counts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.memory.prefix import block_key, scope_key
from tests.builders import lora_adapter, tiny_llama

PAGE = 8
PROMPT = list(range(20, 20 + 5 * PAGE + 3))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return engine_for(model_dir, prefix_cache=True)


def engine_for(model_dir: Path, *, prefix_cache: bool) -> Engine:
    return Engine(
        EngineConfig(
            model_dir, dtype="float32", threads=1, tokens_per_page=PAGE, pool_bytes=2**21, prefix_cache=prefix_cache
        )
    )


def cached(engine: Engine, prompt: list[int], *, adapter: str | None = None, tenant: str = "", new: int = 1) -> int:
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    request = Request(prompt_token_ids=prompt, adapter=adapter, tenant=tenant, sampling=sampling)
    return engine.generate([request])[0].usage.cached_tokens


def test_full_blocks_of_a_common_prefix_are_hits(engine: Engine) -> None:
    assert cached(engine, PROMPT) == 0
    assert cached(engine, PROMPT) == 5 * PAGE
    assert cached(engine, [*PROMPT[: 3 * PAGE + 1], 9, 9, 9, 9, 9, 9, 9, 9]) == 3 * PAGE
    assert cached(engine, [9, *PROMPT[1:]]) == 0


def test_the_last_token_of_a_prompt_is_always_computed(engine: Engine) -> None:
    whole = PROMPT[: 2 * PAGE]
    assert cached(engine, whole) == 0
    assert cached(engine, whole) == PAGE


def test_generated_tokens_are_hits_for_the_next_turn(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=3 * PAGE, ignore_eos=True)
    first = engine.generate([Request(prompt_token_ids=PROMPT, sampling=sampling)])[0]
    conversation = [*PROMPT, *first.token_ids, 9, 9]
    assert cached(engine, conversation) == (len(conversation) - 3) // PAGE * PAGE


def test_tenants_and_adapters_share_no_blocks(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    for index in range(2):
        engine.load_adapter(str(index), lora_adapter(tmp_path / str(index), model_dir, rank=2, seed=index))
    for tenant in ("", "a", "b"):
        for adapter in (None, "0", "1"):
            assert cached(engine, PROMPT, adapter=adapter, tenant=tenant) == 0
            assert cached(engine, PROMPT, adapter=adapter, tenant=tenant) == 5 * PAGE


def test_sequences_of_one_batch_deduplicate_equal_blocks(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    for index in range(4):
        engine.add(Request(request_id=str(index), prompt_token_ids=PROMPT, sampling=sampling))
    engine.step()
    tables = [sequence.pages for sequence in engine._scheduler]
    assert all(table[:5] == tables[0][:5] for table in tables)
    assert len({table[5] for table in tables}) == 4
    engine._pool.check_integrity()
    outputs = engine.generate([])
    while engine.has_work:
        outputs += engine.step()
    assert len({output.token_ids for output in outputs}) == 1


def test_without_the_prefix_cache_no_block_is_kept(model_dir: Path) -> None:
    engine = engine_for(model_dir, prefix_cache=False)
    assert [cached(engine, PROMPT), cached(engine, PROMPT)] == [0, 0]
    assert engine._pool.num_free == engine._pool.num_pages


texts = st.text(max_size=6)


@given(texts, st.binary(max_size=6), st.none() | texts, texts, st.binary(max_size=6), st.none() | texts)
def test_scopes_differ_if_any_part_differs(
    tenant: str, base: bytes, adapter: str | None, tenant2: str, base2: bytes, adapter2: str | None
) -> None:
    same = (tenant, base, adapter) == (tenant2, base2, adapter2)
    assert (scope_key(tenant, base, adapter) == scope_key(tenant2, base2, adapter2)) is same


@given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(0, 300), max_size=6))
def test_block_keys_depend_on_their_predecessors(first: list[int], second: list[int]) -> None:
    scope = scope_key("t", b"m", None)
    assert (block_key(scope, first) == block_key(scope, second)) is (first == second)
    assert block_key(block_key(scope, first), second) != block_key(scope, [*first, *second])
