"""The remote runner with the CPU as the device: copies, padding and recordings change no bit of the output."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import ConfigurationError, Engine, EngineConfig, Output, Request, SamplingParams
from engine.device import CpuDevice, open_device
from engine.device.backend import Backend
from engine.kernels import fallback, load_cpu_kernels
from engine.lora.tables import INITIAL_SLOTS
from engine.step.graphs import batch_buckets
from engine.step.runner import RemoteRunner
from tests.builders import ALL_LINEAR, lora_adapter, tiny_llama

# Skipped without a C++ compiler, except in CI, where a failed build must fail the tests.
pytestmark = pytest.mark.skipif(
    load_cpu_kernels() is fallback and "CI" not in os.environ, reason="torch's operators are not batch-invariant"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    plain = [lora_adapter(root / str(rank), model_dir, rank=rank, seed=rank) for rank in (2, 9, 33)]
    return [*plain, lora_adapter(root / "e", model_dir, rank=5, targets=(*ALL_LINEAR, "embed_tokens", "lm_head"))]


@pytest.fixture
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables small enough to grow during a test."""
    monkeypatch.setattr("engine.lora.tables.INITIAL_SLOTS", 64)
    monkeypatch.setattr("engine.lora.tables.INITIAL_PAGES", 1)


class CountingDevice(CpuDevice):
    """Counts recordings, replays and the compute stream's copies."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.replayed, self.copies, self.forgotten = 0, 0, 0, 0
        copy = self.compute.copy

        def counted(target: Tensor, source: Tensor) -> None:
            self.copies += 1
            copy(target, source)

        self.compute.copy = counted  # type: ignore[method-assign]

    def record(self, work: Any) -> Any:
        self.recorded += 1
        play = super().record(work)

        def replay() -> None:
            self.replayed += 1
            play()

        return replay

    def discard_recordings(self) -> None:
        self.forgotten += 1


def engines(model_dir: Path, adapters: list[Path], **options: Any) -> Iterator[Engine]:
    """One engine on host memory, then one with the CPU as a remote device."""
    settings = {"tokens_per_page": 8, "pool_bytes": 2**23, "max_batch_size": 12, "max_batch_tokens": 100} | options
    config = EngineConfig(model_dir, dtype="float32", threads=1, **settings)
    for backend in (None, Backend(CountingDevice(), load_cpu_kernels(), is_remote=True)):
        engine = Engine(config, backend)
        for index, adapter in enumerate(adapters):
            engine.load_adapter(str(index), adapter)
        yield engine


def requests(count: int, names: list[str | None], new: int = 9) -> list[Request]:
    return [
        Request(
            prompt_token_ids=[5 + i] * (1 + 13 * (i % 4)),
            adapter=names[i % len(names)],
            sampling=SamplingParams(
                max_tokens=1 + (new + 3 * i) % 11, ignore_eos=True, logprobs=2, temperature=i % 2, seed=i
            ),
        )
        for i in range(count)
    ]


def observed(outputs: list[Output]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.error) for output in outputs]


@pytest.mark.parametrize(
    "options", [{}, {"graphs": False}, {"max_batch_tokens": 17}, {"pool_bytes": 2**18 * 3}], ids=str
)
def test_tokens_and_log_probabilities_match_the_local_runner(
    model_dir: Path, adapters: list[Path], options: dict[str, Any]
) -> None:
    """With all adapters mixed, one adapter, and none; and in a pool that evicts adapters and preempts sequences."""
    host, remote = engines(model_dir, adapters, **options)
    for names in ([None, "0", "1", "2", "3"], ["2"], [None], ["1", "0"]):
        asked = requests(14, names)
        assert observed(remote.generate(asked)) == observed(host.generate(asked))


def test_one_recording_serves_every_mix(model_dir: Path, adapters: list[Path]) -> None:
    _, remote = engines(model_dir, adapters[:3])
    device, runner = remote._backend.device, remote._runner
    assert isinstance(device, CountingDevice)
    assert isinstance(runner, RemoteRunner)

    def run(names: list[str | None]) -> int:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        remote.generate([Request(prompt_token_ids=[9, 8], adapter=name, sampling=sampling) for name in names])
        return device.recorded

    assert run([None, "0", "1"]) == 1
    assert run(["2", "1", "0"]) == run([None, None, "2", "1"]) == 1
    assert device.replayed == 3 * 5 - 1
    assert run([None] * 4) == 2
    assert run(["2"] * 4) == 3
    assert run(["1"] * 4) == 3


@pytest.mark.parametrize("largest", [12, 16])
def test_a_warm_engine_records_nothing_for_its_requests(model_dir: Path, adapters: list[Path], largest: int) -> None:
    """For any adapters up to rank 64, with all slots in use, and any number of sequences in a batch."""
    host, remote = engines(model_dir, [], max_batch_size=largest)
    device, runner = remote._backend.device, remote._runner
    assert isinstance(device, CountingDevice)
    assert isinstance(runner, RemoteRunner)
    remote.warm_up()
    assert runner.graphs is not None
    assert len(runner.graphs) == device.recorded == 3 * len(batch_buckets(largest)) - 1
    for engine in (host, remote):
        for index, adapter in enumerate(adapters[:3]):
            engine.load_adapter(str(index), adapter)
    checked = remote.check_adapter(adapters[0])
    for index in range(INITIAL_SLOTS - 3):
        remote.admit_adapter(f"more {index}", checked)
    before = device.recorded
    for names in ([None], ["1"], [None, "0", "1", "2"]):
        for count in (1, 3, 5, 11, 20):
            asked = requests(count, names)
            assert observed(remote.generate(asked)) == observed(host.generate(asked))
    assert device.recorded == before
    assert device.replayed > 20


def test_a_closed_engine_is_freed_immediately(model_dir: Path, adapters: list[Path]) -> None:
    """Its memory is freed with the last reference to it, without the cycle collector."""
    remaining = list(engines(model_dir, adapters))
    gc.disable()
    try:
        while remaining:
            engine = remaining.pop()
            engine.warm_up()
            engine.generate(requests(5, [None, "0", "3"]))
            engine.close()
            engine.close()
            storage = weakref.ref(engine._storage)
            del engine
            assert storage() is None
    finally:
        gc.enable()


def test_a_step_copies_once_to_the_device_and_once_back(model_dir: Path, adapters: list[Path]) -> None:
    """For any sampling parameters; the copy back is the only time that the host waits."""
    _, remote = engines(model_dir, adapters)
    device = remote._backend.device
    assert isinstance(device, CountingDevice)
    for index, options in enumerate(SAMPLINGS):
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=index, **options)
        remote.add(Request(prompt_token_ids=[9, 8, index], adapter=str(index % 3), sampling=sampling))
    while remote.has_work:
        before = device.copies
        remote.step()
        assert device.copies == before + 2


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
]


@pytest.mark.usefixtures("_small_tables")
def test_outputs_are_right_after_a_larger_rank_or_new_tables(
    model_dir: Path, adapters: list[Path], tmp_path: Path
) -> None:
    host, remote = engines(model_dir, adapters[:1])
    asked = requests(6, [None, "0"])
    assert observed(remote.generate(asked)) == observed(host.generate(asked))
    wide = lora_adapter(tmp_path / "wide", model_dir, rank=70, seed=9)
    for engine in (host, remote):
        engine.load_adapter("wide", wide)
        for index in range(70):
            engine.load_adapter(f"more {index}", adapters[0])
    asked = requests(9, [None, "wide", "0", "more 69"])
    assert observed(remote.generate(asked)) == observed(host.generate(asked))


@pytest.mark.usefixtures("_small_tables")
def test_recordings_are_discarded_once_when_they_become_invalid(model_dir: Path, adapters: list[Path]) -> None:
    """Before the next one is recorded, because the memory of recordings is freed with the last of them."""
    _, remote = engines(model_dir, adapters[:1])
    device = remote._backend.device
    assert isinstance(device, CountingDevice)
    remote.generate(requests(3, [None, "0"]))
    before = device.forgotten, device.recorded
    remote.generate(requests(3, [None, "0"]))
    assert (device.forgotten, device.recorded) == before
    checked = remote.check_adapter(adapters[0])
    for index in range(70):
        remote.admit_adapter(f"more {index}", checked)
    remote.generate(requests(3, [None, "0"]))
    assert device.forgotten == before[0] + 1
    assert device.recorded > before[1]


@pytest.mark.usefixtures("_small_tables")
def test_every_reallocation_causes_a_new_recording(model_dir: Path, adapters: list[Path], tmp_path: Path) -> None:
    """Of the tables' rows, an adapter's pages, the staging buffers and the rank bound."""
    _, remote = engines(model_dir, adapters[:1])
    device, runner = remote._backend.device, remote._runner
    assert isinstance(device, CountingDevice)
    assert isinstance(runner, RemoteRunner)
    asked = [Request(prompt_token_ids=[9], adapter="0", sampling=SamplingParams(max_tokens=4, ignore_eos=True))]
    checked = remote.check_adapter(adapters[0])

    def record() -> int:
        remote.generate(asked)
        return device.recorded

    def rows(first: int, end: int) -> None:
        for index in range(first, end):
            remote.admit_adapter(f"more {index}", checked)

    assert record() == record() == 1
    rows(0, 70)
    assert record() == record() == 2
    rows(70, 140)
    assert record() == record() == 3
    tables = remote._adapters.tables
    tables.set_pages(0, range(2 * tables.pages.shape[1]))  # type: ignore[arg-type]
    remote.evict_adapter("0")
    assert record() == record() == 4
    runner._staging._grow(2 * len(runner._staging._device_buffer))
    assert record() == record() == 5
    remote.load_adapter("wide", lora_adapter(tmp_path / "wide", model_dir, rank=70))
    assert record() == record() == 6


def test_errors_name_an_unavailable_device(model_dir: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigurationError, match="device is 'cuda', but torch finds no CUDA device"):
        Engine(EngineConfig(model_dir, device="cuda"))
    with pytest.raises(ConfigurationError, match="it must be cpu, cuda or cuda:N"):
        EngineConfig(model_dir, device="tpu")
    assert open_device("cpu").torch_device.type == "cpu"
