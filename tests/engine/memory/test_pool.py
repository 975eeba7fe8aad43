"""Every page is free or owned exactly once after any sequence of operations."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine import AdapterInUseError, Engine, EngineConfig, Request, SamplingParams
from engine.memory.pool import PagePool, SequencePages
from engine.memory.residency import Residency
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.types import RequestId
from tests.builders import lora_adapter, tiny_llama


def test_check_integrity_detects_lost_and_duplicated_pages() -> None:
    pool = PagePool(4)
    owner = SequencePages(RequestId("a"))
    pages = list(pool.allocate(owner, 3))
    pool.check_integrity()
    pool._pages[owner] = pages[1:]
    with pytest.raises(AssertionError, match="3 pages accounted for, 4 exist"):
        pool.check_integrity()
    pool._pages[owner] = [*pages, pages[0]]
    with pytest.raises(AssertionError):
        pool.check_integrity()


lengths = st.tuples(st.integers(1, 30), st.integers(1, 20))


@given(
    st.lists(lengths, min_size=1, max_size=12),
    st.integers(13, 30),
    st.integers(1, 6),
    st.integers(6, 40),
    st.booleans(),
)
def test_the_scheduler_finishes_every_sequence(
    sizes: list[tuple[int, int]], num_pages: int, batch_size: int, batch_tokens: int, cached: bool
) -> None:
    """Within its limits in every step, and in a bounded number of steps."""
    pool = PagePool(num_pages)
    residency = Residency(pool)
    scheduler = Scheduler(pool, residency, 4, batch_size, batch_tokens, prefix_cache=cached)
    for number, (prompt, new) in enumerate(sizes):
        sampling = SamplingParams(max_tokens=new)
        scheduler.add(Sequence(RequestId(str(number)), (5,) * prompt, sampling, None, 0))
    steps = 0
    while len(scheduler):
        plan = scheduler.plan().slices
        assert plan
        assert len({part.sequence.request_id for part in plan}) == len(plan) <= batch_size
        assert sum(part.num_tokens for part in plan) <= batch_tokens
        for part in plan:
            sequence = part.sequence
            is_last = part.is_last
            assert len(sequence.pages) * 4 >= sequence.num_computed + part.num_tokens
            scheduler.computed(part)
            if is_last:
                sequence.output_ids.append(1)
                if sequence.num_tokens == sequence.max_tokens:
                    scheduler.remove(sequence)
        pool.check_integrity()
        steps += 1
        assert steps < 5000
    assert residency.num_available == num_pages


class EngineMachine(RuleBasedStateMachine):
    """Random operations on a real engine with few pages."""

    def __init__(self, model_dir: Path, adapter_dirs: list[Path]) -> None:
        super().__init__()
        page_bytes = 2 * 32 * 8 * 4
        self.engine = Engine(
            EngineConfig(
                model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=28 * page_bytes, max_batch_size=5
            )
        )
        self.adapter_dirs = adapter_dirs
        self.open: list[str] = []

    @rule(prompt=st.integers(1, 50), new=st.integers(1, 30), adapter=st.integers(0, 2))
    def add(self, prompt: int, new: int, adapter: int) -> None:
        name = f"a{adapter}" if f"a{adapter}" in self.engine.adapters else None
        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        self.open.append(self.engine.add(Request(prompt_token_ids=[7] * prompt, adapter=name, sampling=sampling)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.open))
        assert self.engine.cancel(chosen)
        self.open.remove(chosen)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                assert output.error is None
                self.open.remove(output.request_id)

    @rule(slot=st.integers(0, 2), which=st.integers(0, 1))
    def load(self, slot: int, which: int) -> None:
        try:
            self.engine.load_adapter(f"a{slot}", self.adapter_dirs[which])
        except AdapterInUseError:
            assert self.open

    @rule(slot=st.integers(0, 2))
    def unload(self, slot: int) -> None:
        if f"a{slot}" in self.engine.adapters:
            try:
                self.engine.unload_adapter(f"a{slot}")
            except AdapterInUseError:
                assert self.open

    @invariant()
    def pages_add_up(self) -> None:
        self.engine._pool.check_integrity()
        assert self.engine.has_work is bool(self.open)

    def teardown(self) -> None:
        while self.open:
            self.step(times=1)
        assert self.engine._residency.num_available == self.engine._pool.num_pages


def test_all_pages_are_freed_after_any_operations(tmp_path: Path) -> None:
    model_dir = tiny_llama(tmp_path / "model", num_hidden_layers=1)
    adapters = [lora_adapter(tmp_path / f"a{i}", model_dir, rank=2 + i, seed=i) for i in range(2)]
    run_state_machine_as_test(
        lambda: EngineMachine(model_dir, adapters),
        settings=settings(max_examples=25, stateful_step_count=30, deadline=None),
    )
