"""Adapters and KV share one pool: idle residents are evicted and reloaded when needed, without changing any output."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import AdapterError, Engine, EngineConfig, Output, PromptTooLongError, Request, SamplingParams
from engine.memory.pool import AdapterPages, BlockPage, PagePool, SequencePages
from engine.memory.residency import Residency, Resident
from engine.scheduling.scheduler import MAX_WAITED_STEPS
from engine.types import AdapterName, BlockKey, RequestId
from tests.builders import lora_adapter, tiny_llama

PAGE_BYTES = 3 * 2 * 32 * 8 * 4
ADAPTER_PAGES = 17
"""A rank of at most 8 on all projections of the tiny model: 17 tiles a layer, one tile a page."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [lora_adapter(root / str(i), model_dir, rank=3 + i, seed=i) for i in range(4)]


def engine_with(model: Path, adapters: list[Path], pages: int, **options: int) -> Engine:
    settings = {"tokens_per_page": 8, "threads": 1, "pool_bytes": pages * PAGE_BYTES} | options
    engine = Engine(EngineConfig(model, dtype="float32", **settings))  # type: ignore[arg-type]  # all of them are ints
    for index, adapter in enumerate(adapters):
        assert engine.load_adapter(str(index), adapter).num_bytes == ADAPTER_PAGES * PAGE_BYTES
    return engine


def request(adapter: str | None, prompt: list[int], new: int = 12) -> Request:
    sampling = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=3)
    return Request(prompt_token_ids=prompt, adapter=adapter, sampling=sampling)


def observed(outputs: list[Output]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.error) for output in outputs]


def residents(engine: Engine) -> set[str]:
    return {name for name in engine.adapters if AdapterPages(AdapterName(name)) in engine._residency}


def test_idle_adapters_are_evicted_for_other_adapters_and_for_kv(model_dir: Path, adapters: list[Path]) -> None:
    tight = engine_with(model_dir, adapters, pages=45)
    assert residents(tight) == {"2", "3"}
    assert set(tight.adapters) == {"0", "1", "2", "3"}
    roomy = engine_with(model_dir, adapters, pages=400)
    requests = [request(str(i % 4), [9 + i] * 30, new=20) for i in range(12)] + [request(None, [5] * 200)]
    assert observed(tight.generate(requests)) == observed(roomy.generate(requests))
    tight.generate([request(None, [6] * 300)])
    assert residents(tight) == set()
    assert observed(tight.generate(requests)) == observed(roomy.generate(requests))


def test_alternating_adapters_repeat_exactly(model_dir: Path, adapters: list[Path]) -> None:
    """Two adapters with the same prompts, in a pool that fits one of them and a few blocks: each evicts the other."""
    shared = list(range(20, 60))
    requests = [request(str(i % 2), [*shared, 70 + i // 2]) for i in range(12)]
    alone = [engine_with(model_dir, adapters[:2], pages=60).generate([r])[0] for r in requests]
    engine = engine_with(model_dir, adapters[:2], pages=ADAPTER_PAGES + 8)
    for _ in range(2):
        assert observed([engine.generate([r])[0] for r in requests]) == observed(alone)
        assert observed(engine.generate(requests)) == observed(alone)
    assert engine._residency.num_evictions > 50
    assert observed(alone[::2]) != observed(alone[1::2])


def test_replacing_an_adapter_never_reuses_its_old_blocks(model_dir: Path, adapters: list[Path]) -> None:
    engine = engine_with(model_dir, adapters[:1], pages=200)
    prompt = list(range(20, 60))
    first = engine.generate([request("0", prompt)])[0]
    assert engine.generate([request("0", prompt)])[0].usage.cached_tokens == 32
    engine.load_adapter("0", adapters[1])
    other = engine.generate([request("0", prompt)])[0]
    assert other.usage.cached_tokens == 0
    assert observed([other]) == observed(
        engine_with(model_dir, [adapters[1]], pages=200).generate([request("0", prompt)])
    )
    engine.load_adapter("0", adapters[0])
    again = engine.generate([request("0", prompt)])[0]
    assert again.usage.cached_tokens == 32
    assert observed([again]) == observed([first])


def test_an_adapter_that_cannot_be_reloaded_fails_only_its_requests(
    model_dir: Path, adapters: list[Path], tmp_path: Path
) -> None:
    lost, changed = tmp_path / "lost", tmp_path / "changed"
    shutil.copytree(adapters[0], lost)
    shutil.copytree(adapters[1], changed)
    engine = engine_with(model_dir, [lost, changed, adapters[2]], pages=60)
    good = request("2", [8] * 20)
    expected = observed(engine.generate([good]))
    engine.generate([request(None, [6] * 400)])
    assert not residents(engine)
    shutil.rmtree(lost)
    shutil.copy(adapters[3] / "adapter_model.safetensors", changed)
    outputs = engine.generate([request("0", [5]), good, request("1", [5]), request("0", [7])])
    assert observed([outputs[1]]) == expected
    for output, name in zip((outputs[0], outputs[2], outputs[3]), ("0", "1", "0"), strict=True):
        assert isinstance(output.error, AdapterError)
        assert f"the files of adapter {name!r}" in str(output.error)
    shutil.copytree(adapters[0], lost)
    engine.load_adapter("0", lost)
    assert engine.generate([request("0", [5])])[0].error is None


def test_requests_and_adapters_that_can_never_fit_are_rejected_with_numbers(
    model_dir: Path, adapters: list[Path], tmp_path: Path
) -> None:
    engine = engine_with(model_dir, adapters[:1], pages=20)
    need = f"need {4 * PAGE_BYTES} bytes of KV and {ADAPTER_PAGES * PAGE_BYTES} for the adapter; the pool has"
    with pytest.raises(PromptTooLongError, match=rf"20 prompt tokens and max_tokens 12 {need} {20 * PAGE_BYTES}"):
        engine.add(request("0", [5] * 20))
    wide = lora_adapter(tmp_path / "wide", model_dir, rank=64)
    with pytest.raises(
        AdapterError, match=rf"'wide' takes {136 * PAGE_BYTES} bytes, but the pool has {20 * PAGE_BYTES}"
    ):
        engine.load_adapter("wide", wide)
    assert set(engine.adapters) == {"0"}


def test_a_cold_adapter_does_not_wait_indefinitely(model_dir: Path, adapters: list[Path]) -> None:
    """Base requests that fill the pool overtake it for a bounded number of steps and are then preempted."""
    engine = engine_with(model_dir, adapters[:1], pages=48)
    engine.generate([request(None, [6] * 350)])
    assert not residents(engine)
    base = [request(None, [5 + i] * 8, new=300) for i in range(6)]
    ids = [engine.add(r) for r in base]
    engine.step()
    cold = engine.add(request("0", [9] * 8))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step()]
    assert set(order) == {*ids, cold}
    assert engine._scheduler.num_preemptions > 0


def test_sequences_yield_to_overdue_ones_in_a_bounded_number_of_steps(model_dir: Path, adapters: list[Path]) -> None:
    engine = engine_with(model_dir, adapters[:2], pages=26)
    requests = [request(str(i % 2), [5 + i] * 6, new=50) for i in range(4)]
    ids = {engine.add(r) for r in requests}
    steps = 0
    while engine.has_work:
        ids -= {output.request_id for output in engine.step()}
        steps += 1
        assert steps < 8 * (MAX_WAITED_STEPS + 60)
    assert not ids


names = st.sampled_from(
    [AdapterPages(AdapterName(c)) for c in "ab"] + [BlockPage(BlockKey(bytes([i]))) for i in range(6)]
)


@given(
    st.integers(8, 20),
    st.lists(st.tuples(names, st.sampled_from(["acquire", "release", "evict last", "allocate"])), max_size=60),
)
def test_the_least_recently_used_is_evicted_first(num_pages: int, calls: list[tuple[Resident, str]]) -> None:
    """Compared with the definition: a list of idle residents in the order of their release or `evict_last`."""
    pool = PagePool(num_pages)
    residency = Residency(pool)
    queue: list[Resident] = []
    users: dict[Resident, int] = {}
    for owner, call in calls:
        size = 3 if isinstance(owner, AdapterPages) else 1
        if call == "allocate":
            owner, size = SequencePages(RequestId("s")), 1  # type: ignore[assignment]
        if call == "evict last":
            residency.evict_last([owner])
            queue = [*(other for other in queue if other != owner), *([owner] if owner in queue else [])]
        elif owner in users and call == "acquire":
            residency.acquire(owner)
            users[owner] += 1
            queue = [other for other in queue if other != owner]
        elif owner in users and call == "release" and users[owner]:
            residency.release(owner)
            users[owner] -= 1
            queue += [owner] if not users[owner] else []
        elif owner not in users and call in ("acquire", "allocate"):
            idle = sum(3 if isinstance(other, AdapterPages) else 1 for other in queue)
            assert residency.num_available == pool.num_free + idle
            if size > residency.num_available:
                continue
            while pool.num_free < size:
                evicted = queue.pop(0)
                evicted_size = 3 if isinstance(evicted, AdapterPages) else 1
                del users[evicted]
                assert evicted in residency
                pool_before = pool.num_free
                residency.allocate(SequencePages(RequestId("probe")), min(size, pool.num_free + evicted_size))
                assert evicted not in residency
                pool.release(SequencePages(RequestId("probe")))
                assert pool.num_free == pool_before + evicted_size
            residency.allocate(owner, size)
            if call == "acquire":
                residency.admit(owner)
                users[owner] = 1
        pool.check_integrity()
    assert set(residency._users) == set(users)
