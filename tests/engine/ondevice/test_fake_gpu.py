"""The fake GPU rejects what a GPU rejects, and replays what a CUDA graph replays."""

import pytest
import torch

from tests.engine.ondevice.engines import INTERPRETED, waits_raise
from tests.engine.ondevice.fake_gpu import FakeGpu, FakeGpuTensor

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="with a GPU the fake one is not used")


def test_operators_that_mix_host_and_device_tensors_raise() -> None:
    on_gpu, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    assert isinstance(on_gpu, FakeGpuTensor)
    assert on_gpu.is_cuda
    assert (on_gpu * 2 + torch.tensor(1.0)).sum().item() == 9.0
    for mix in (
        lambda: on_gpu + on_host,
        lambda: torch.add(on_host, on_host, out=on_gpu),
        lambda: on_gpu.index_copy_(0, on_host, on_host),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    with pytest.raises((RuntimeError, TypeError)):
        on_gpu.numpy()


def test_operations_that_make_the_host_wait_raise_while_forbidden() -> None:
    device = FakeGpu()
    on_gpu, locked, pageable = device.zeros(4), device.host(4), torch.ones(4, dtype=torch.uint8)
    with waits_raise():
        device.compute.copy(on_gpu, locked)
        device.compute.copy(locked, on_gpu)
        for wait in (
            lambda: int(on_gpu.sum()),
            lambda: bool(on_gpu[0]),
            lambda: on_gpu[on_gpu > 0],
            lambda: on_gpu.nonzero(),
            lambda: on_gpu.cpu(),
            lambda: on_gpu.copy_(locked),
            lambda: pageable.to(device.torch_device),
            lambda: device.compute.copy(on_gpu, pageable),
        ):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
    assert on_gpu.cpu().tolist() == [0, 0, 0, 0]


def test_a_recording_contains_device_work_and_no_host_work() -> None:
    x, seen = torch.zeros(3, device="cuda"), [0.0]
    last: list[torch.Tensor] = []

    def work() -> None:
        seen[0] += 1.0
        last.append((x[1:] * 2 + seen[0])[:1])

    replay = FakeGpu().record(work)
    assert last[-1].item() == 2.0
    seen[0], x[1] = 100.0, 5.0
    replay()
    assert last[-1].item() == 12.0
    assert len(last) == 2


def test_a_recording_cannot_read_values_back() -> None:
    x = torch.zeros(1, device="cuda")
    with pytest.raises(AssertionError, match="cannot be captured"):
        FakeGpu().record(lambda: print(x.item()))


def test_the_device_owns_host_memory_until_an_event_is_done() -> None:
    device = FakeGpu()
    on_gpu, sent, fetched = device.zeros(8), device.host(8), device.host(8)
    sent.fill_(7)
    device.compute.copy(on_gpu, sent)
    device.compute.copy(fetched, on_gpu)
    read = device.compute.record_event()
    assert fetched.tolist() == [0xFF] * 8
    assert [read.is_done() for _ in range(2)] == [False, True]
    assert fetched.tolist() == [7] * 8
    device.compute.copy(on_gpu, sent)
    sent.fill_(8)
    with pytest.raises(AssertionError, match="written before the device had read it"):
        device.compute.record_event().wait()
