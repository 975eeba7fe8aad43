"""Arrays are sent to the device in one copy, to the same addresses in every step."""

import numpy as np
import torch

from engine.device import CpuDevice
from engine.step.graphs import batch_bucket, block_bucket
from engine.step.staging import Staging


class Copies(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        given = self.compute.copy

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            self.count += 1
            given(target, source)

        self.compute.copy = copy  # type: ignore[method-assign]


def arrays(seed: int, length: int = 5) -> list[np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 99, (3, length), dtype=np.int32),
        rng.integers(0, 99, length, dtype=np.int64),
        np.empty(0, np.int32),
        rng.random(7, dtype=np.float32),
    ]


def test_one_copy_at_the_same_addresses_every_step() -> None:
    device = Copies()
    staging = Staging(device, 4096)
    places = set()
    for step in range(5):
        sent = staging.send(arrays(step))
        assert device.count == step + 1
        for tensor, array in zip(sent, arrays(step), strict=True):
            assert np.array_equal(tensor.numpy(), array)
        places.add(tuple(tensor.data_ptr() for tensor in sent))
    assert len(places) == 1
    assert staging.generation == 0


def test_arrays_that_do_not_fit_grow_the_buffers_and_the_generation() -> None:
    staging = Staging(CpuDevice(), 64)
    sent = staging.send(arrays(1, 300))
    assert staging.generation == 1
    assert np.array_equal(sent[0].numpy(), arrays(1, 300)[0])


def test_buckets() -> None:
    assert [batch_bucket(n, 20) for n in (1, 2, 3, 4, 5, 8, 9, 17, 20)] == [1, 2, 4, 4, 8, 8, 16, 20, 20]
    assert [block_bucket(n) for n in (1, 9, 16, 17, 33)] == [16, 16, 16, 32, 64]
