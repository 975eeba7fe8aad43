"""Loading adapters delays no other request: on a fake clock and device, and on the CPU engine with a slow reader."""

import itertools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import AdapterError, Engine, EngineConfig, Output, Request, SamplingParams
from engine.device import CpuDevice
from engine.files.model_config import read_model_config
from engine.lora.reading import Task
from engine.lora.transfer import AdapterLoad, LoadResult, StagedLoader, consecutive_runs
from engine.memory.host import HostTier
from engine.memory.pool import PagePool
from engine.memory.residency import Residency
from engine.memory.storage import Storage
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.types import AdapterName, PageId, RequestId
from tests.builders import lora_adapter, tiny_llama

STEP_S, PAGE_COPY_S, READ_S = 0.010, 0.004, 0.080


class Clock:
    now = 0.0


class At:
    """An event or task that is done at a time of the fake clock."""

    def __init__(self, clock: Clock, at: float, error: AdapterError | None = None) -> None:
        self.clock, self.at, self.error = clock, at, error

    def is_done(self) -> bool:
        return self.clock.now >= self.at

    done = is_done

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def result(self) -> None:
        if self.error is not None:
            raise self.error


class FakeStream:
    """Executes work immediately and simulates its duration; `lag` is the time at which all work so far is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.lag, self.stalled_s = clock, 0.0, 0.0

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        num_pages = len(target) if target.dtype == torch.uint8 else 0
        self.lag = max(self.lag, self.clock.now) + PAGE_COPY_S * num_pages

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        target.index_copy_(0, index, source)

    def record_event(self) -> At:
        return At(self.clock, max(self.lag, self.clock.now))

    def wait_for(self, event: At) -> None:
        self.stalled_s += max(event.at - max(self.lag, self.clock.now), 0.0)
        self.lag = max(self.lag, event.at)


class FakeDevice(CpuDevice):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.compute, self.transfers = FakeStream(clock), FakeStream(clock)  # type: ignore[assignment]


class FakeReader:
    """Reads one adapter at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at, self.count = clock, 0.0, 0

    def start(self, work: Callable[[], None]) -> Task:
        error = None
        try:
            work()
        except AdapterError as failed:
            error = failed
        self.count += 1
        self.free_at = max(self.free_at, self.clock.now) + READ_S
        return At(self.clock, self.free_at, error)

    def wait(self, timeout_s: float) -> None:
        self.clock.now = min(self.clock.now + timeout_s, max(self.free_at, self.clock.now))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def fill(value: int, tiles: Tensor, pages: Collection[PageId]) -> None:
    tiles[:, list(pages)] = value


class World:
    """A scheduler and loader with a real pool and a fake clock; an adapter's contents are its number."""

    def __init__(self, model_dir: Path, num_pages: int, host_pages: int, batch: int) -> None:
        self.clock = Clock()
        self.device, self.reader = FakeDevice(self.clock), FakeReader(self.clock)
        model = read_model_config(model_dir)
        page = Storage(model, torch.float32, 8, 2**20, CpuDevice()).bytes_per_page_id
        self.storage = Storage(model, torch.float32, 8, num_pages * page, CpuDevice())
        self.loader = StagedLoader(
            self.device, self.reader, self.storage, HostTier(self.storage, self.device, host_pages * page)
        )
        self.pool = PagePool(num_pages)
        self.residency = Residency(self.pool)
        self.scheduler = Scheduler(self.pool, self.residency, 8, batch, 256, prefix_cache=False)
        self.finished: dict[str, float] = {}
        self.steps: list[set[str]] = []

    def add(self, name: str, adapter: int | None, prompt: int, new: int, adapter_pages: int = 3) -> None:
        owner = None if adapter is None else AdapterName(str(adapter))
        self.scheduler.add(
            Sequence(
                RequestId(name),
                (5,) * prompt,
                SamplingParams(max_tokens=new),
                owner,
                0,
                adapter_num_pages=0 if adapter is None else adapter_pages,
            )
        )

    def step(self) -> None:
        for load in self.loader.advance():
            assert load.error is None
            self.check_bytes(load)
            self.scheduler.load_finished(load.name)
        plan = self.scheduler.plan()
        for name in plan.loads:
            pages = tuple(self.pool.pages_of(next(o for o in self.pool._pages if getattr(o, "name", None) == name)))
            self.loader.start(AdapterLoad(name, pages, partial(fill, int(name))))
        if not plan.slices:
            assert self.scheduler.loading or not len(self.scheduler)
            self.loader.wait(0.02)
            self.clock.now += 0.001
            return
        self.loader.use({p.sequence.adapter for p in plan.slices if p.sequence.adapter is not None})
        assert all(p.sequence.adapter not in self.scheduler.loading for p in plan.slices)
        self.steps.append({p.sequence.request_id for p in plan.slices})
        self.clock.now += STEP_S
        for part in plan.slices:
            sequence, is_last = part.sequence, part.is_last
            self.scheduler.computed(part)
            if is_last:
                sequence.output_ids.append(1)
                if sequence.num_tokens == sequence.max_tokens:
                    self.scheduler.remove(sequence)
                    self.finished[sequence.request_id] = self.clock.now

    def check_bytes(self, load: LoadResult) -> None:
        owner = next(o for o in self.pool._pages if getattr(o, "name", None) == load.name)
        assert (self.storage.tiles[:, list(self.pool.pages_of(owner))] == int(load.name)).all()

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not len(self.scheduler) and not self.scheduler.loading:
                break
            self.step()
            self.pool.check_integrity()
        assert not len(self.scheduler)
        assert self.residency.num_available == self.pool.num_pages


def test_no_step_waits_for_a_transfer_that_it_does_not_need(model_dir: Path) -> None:
    """Hot sequences compute a token in every step while six cold adapters load, and finish as early as without them."""
    world = World(model_dir, num_pages=80, host_pages=40, batch=12)
    for i in range(3):
        world.add(f"hot {i}", None, 4, 40)
    for i in range(6):
        world.add(f"cold {i}", i, 4, 5)
    world.run()
    for step in world.steps[:40]:
        assert {"hot 0", "hot 1", "hot 2"} <= step
    assert world.finished["hot 0"] == pytest.approx(40 * STEP_S)
    assert world.device.compute.stalled_s == 0.0  # type: ignore[attr-defined]
    assert world.finished["cold 0"] < world.finished["cold 5"] < 6 * READ_S + 0.2
    assert world.reader.count == 6


def test_adapters_of_queued_sequences_load_while_the_batch_is_full(model_dir: Path) -> None:
    world = World(model_dir, num_pages=80, host_pages=40, batch=2)
    for i in range(2):
        world.add(f"hot {i}", None, 4, 30)
    world.add("next", 1, 4, 5)
    world.run()
    assert "next" in world.steps[30]
    assert world.finished["next"] == pytest.approx(35 * STEP_S)


@given(st.lists(st.integers(0, 12), unique=True))
def test_consecutive_runs_cover_all_pages_in_order_and_are_maximal(ids: list[int]) -> None:
    pages = [PageId(each) for each in ids]
    runs = list(consecutive_runs(pages))
    assert [page for first, last in runs for page in range(pages[first], pages[first] + last - first)] == pages
    assert all(pages[last] != pages[last - 1] + 1 for (_, last), _ in itertools.pairwise(runs))


def fewest_loads(order: list[int], room: int) -> int:
    """Belady's MIN for adapters of equal size, used one after the other: evict the one whose next use is farthest."""
    resident: set[int] = set()
    loads = 0
    for at, needed in enumerate(order):
        if needed in resident:
            continue
        if len(resident) == room:
            later = order[at:]
            resident.remove(max(resident, key=lambda other: later.index(other) if other in later else len(order)))
        resident.add(needed)
        loads += 1
    return loads


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 7), min_size=1, max_size=60), room=st.integers(3, 6))
@example(order=[0, 1, 2, 3, 4, 5, 6] * 8, room=5)
def test_a_known_queue_loads_as_little_as_possible(model_dir: Path, order: list[int], room: int) -> None:
    """No adapter is evicted for one that is needed later; prefetching costs only the room of the one being loaded."""
    world = World(model_dir, num_pages=3 * room + 3, host_pages=40, batch=1)
    for index, adapter in enumerate(order):
        world.add(str(index), adapter, 4, 4)
    world.run()
    assert world.residency.num_adapter_loads <= fewest_loads(order, room - 1)


def test_adapters_in_the_host_tier_are_not_read_again(model_dir: Path) -> None:
    world = World(model_dir, num_pages=8, host_pages=40, batch=4)
    for turn in range(3):
        for adapter in range(3):
            world.add(f"{turn} {adapter}", adapter, 4, 3)
            world.run()
    assert world.residency.num_evictions > 3
    assert world.reader.count == 3


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.none() | st.integers(0, 5), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=14
    ),
    num_pages=st.integers(9, 40),
    host_pages=st.integers(3, 12),
    batch=st.integers(1, 5),
)
def test_every_sequence_finishes_under_any_load(
    model_dir: Path, jobs: list[tuple[int | None, int, int]], num_pages: int, host_pages: int, batch: int
) -> None:
    """Each loaded adapter's pages have its contents, no page is lost, and computing never waits for a transfer."""
    world = World(model_dir, num_pages, host_pages, batch)
    for index, (adapter, prompt, new) in enumerate(jobs):
        world.add(str(index), adapter, prompt, new)
        world.step()
    world.run()
    assert set(world.finished) == {str(i) for i in range(len(jobs))}
    assert world.device.compute.stalled_s == 0.0  # type: ignore[attr-defined]


class BlockedReader:
    """A reader whose tasks run only when the test releases them."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.tasks: list[BlockedTask] = []

    def start(self, work: Callable[[], None]) -> Task:
        self.tasks.append(BlockedTask(work))
        return self.tasks[-1]

    def wait(self, timeout_s: float) -> None:
        """Returns immediately: no task finishes on its own."""

    def release(self) -> None:
        for task in self.tasks:
            task.run()


class BlockedTask:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.is_done, self.error = work, False, None

    def run(self) -> None:
        self.work()
        self.is_done = True

    def done(self) -> bool:
        return self.is_done

    def result(self) -> None:
        assert self.is_done


def request(adapter: str | None, prompt: list[int], new: int) -> Request:
    sampling = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=1)
    return Request(prompt_token_ids=prompt, adapter=adapter, sampling=sampling)


def drain(engine: Engine) -> dict[str, Output]:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def test_decoding_continues_while_an_evicted_adapter_is_read_from_a_slow_disk(model_dir: Path, tmp_path: Path) -> None:
    reader = BlockedReader()
    page = 3 * 2 * 32 * 8 * 4
    config = EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=60 * page)
    engine = Engine(config, reader=reader)
    engine.load_adapter("a", lora_adapter(tmp_path / "a", model_dir, rank=5))
    asked = request("a", [9, 8, 7], 6)
    expected = engine.generate([asked])[0]
    engine.generate([request(None, [6] * 420, 2)])
    assert not reader.tasks
    cold = engine.add(asked)
    others = [engine.add(request(None, [5 + i], 20)) for i in range(3)]
    outputs: dict[str, Output] = {}
    for _ in range(21):
        outputs |= {output.request_id: output for output in engine.step()}
    assert set(outputs) == set(others)
    assert len(reader.tasks) == 1
    assert engine.step() == []
    reader.release()
    late = drain(engine)[cold]
    assert (late.token_ids, late.logprobs) == (expected.token_ids, expected.logprobs)


def test_an_adapter_is_admitted_without_a_read_and_loaded_in_the_background(model_dir: Path, tmp_path: Path) -> None:
    page = 3 * 2 * 32 * 8 * 4
    config = EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=60 * page)
    path = lora_adapter(tmp_path / "a", model_dir, rank=5)
    asked = request("a", [9, 8, 7], 6)
    loaded = Engine(config)
    info = loaded.load_adapter("a", path)
    expected = loaded.generate([asked])[0]
    reader = BlockedReader()
    engine = Engine(config, reader=reader)
    assert engine.admit_adapter("a", engine.check_adapter(path)) == info
    assert engine.adapter_traffic.loads == 0
    cold, other = engine.add(asked), engine.add(request(None, [5], 20))
    outputs = [output.request_id for _ in range(21) for output in engine.step()]
    assert outputs == [other]
    reader.release()
    late = drain(engine)[cold]
    assert (late.token_ids, late.logprobs) == (expected.token_ids, expected.logprobs)


def test_adapters_can_be_checked_while_another_thread_steps(model_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=2**22)
    engine = Engine(config)
    paths = [lora_adapter(tmp_path / str(seed), model_dir, rank=5, seed=seed) for seed in range(6)]
    expected = [engine.check_adapter(path).info for path in paths]
    asked = [request(None, [9, 8, index], 30) for index in range(4)]
    alone = [output.token_ids for output in engine.generate(asked)]
    with ThreadPoolExecutor(2) as threads:
        checks = [threads.submit(engine.check_adapter, path) for path in paths * 3]
        concurrent = [output.token_ids for output in engine.generate(asked)]
        checked = [check.result() for check in checks]
    assert concurrent == alone
    assert [each.info for each in checked] == expected * 3
    for index, each in enumerate(checked):
        assert engine.admit_adapter(str(index), each).name == str(index)
    outputs = engine.generate([request(str(index), [9, 8, 7], 6) for index in range(len(checked))])
    assert not any(output.error for output in outputs)
    assert len({output.token_ids for output in outputs}) > 1


def test_files_that_change_between_check_and_first_use_fail_only_their_requests(
    model_dir: Path, tmp_path: Path
) -> None:
    config = EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=2**22)
    engine = Engine(config)
    path = lora_adapter(tmp_path / "a", model_dir, rank=5)
    engine.admit_adapter("a", engine.check_adapter(path))
    lora_adapter(path, model_dir, rank=5, seed=9)
    bad, good = engine.generate([request("a", [9, 8, 7], 6), request(None, [9, 8, 7], 6)])
    assert "the files of adapter 'a'" in str(bad.error)
    assert good.error is None


def test_an_adapter_being_loaded_can_be_cancelled_unloaded_and_reloaded(model_dir: Path, tmp_path: Path) -> None:
    """With real threads: unloading waits for the running load, and no page is lost."""
    page = 3 * 2 * 32 * 8 * 4
    config = EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=60 * page)
    engine = Engine(config)
    path = lora_adapter(tmp_path / "a", model_dir, rank=5)
    engine.load_adapter("a", path)
    expected = engine.generate([request("a", [9, 8, 7], 4)])[0].token_ids
    for _ in range(5):
        engine.generate([request(None, [6] * 420, 2)])
        cold = engine.add(request("a", [9, 8, 7], 4))
        engine._plan()
        assert engine.cancel(cold)
        engine.unload_adapter("a")
        assert not engine._scheduler.loading
        engine.load_adapter("a", path)
        assert engine.generate([request("a", [9, 8, 7], 4)])[0].token_ids == expected
    engine._pool.check_integrity()
