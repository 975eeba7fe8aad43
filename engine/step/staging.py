"""Packs a step's arrays into one host buffer and copies it to the device in one transfer."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device import Device, Event

Array = npt.NDArray[np.generic]

ALIGNMENT = 16
MAX_CACHED_VIEWS = 4096


class Staging:
    """One buffer on the device and two on the host, so that one can be filled while the other is still being copied.

    Arrays of the same sizes in the same order always get the same device addresses. If the arrays outgrow the buffers,
    the buffers are reallocated and `generation` increases.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.generation = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._host_buffers = [self._device.host(num_bytes) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]
        self._current = 0
        self._device_buffer = self._device.zeros(num_bytes)
        self._view = functools.lru_cache(MAX_CACHED_VIEWS)(functools.partial(_view_of, self._device_buffer))

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Copy arrays to the device; the returned tensors are valid until the next call."""
        ends = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        offsets = [0, *np.cumsum(ends).tolist()]
        if offsets[-1] > len(self._device_buffer):
            self._grow(offsets[-1])
        host_buffer = self._free_buffer()
        target = host_buffer.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if offsets[-1]:
            self._device.compute.copy(self._device_buffer[: offsets[-1]], host_buffer[: offsets[-1]])
        self._copied[self._current] = self._device.compute.record_event()
        return [
            self._view(offset, array.dtype.str, array.shape) for array, offset in zip(arrays, offsets, strict=False)
        ]

    def _free_buffer(self) -> Tensor:
        """Wait for and return the host buffer that was not used by the previous call."""
        self._current = 1 - self._current
        if (event := self._copied[self._current]) is not None:
            event.wait()
        return self._host_buffers[self._current]

    def _grow(self, num_bytes: int) -> None:
        for event in self._copied:
            if event is not None:
                event.wait()
        self._allocate(1 << (num_bytes - 1).bit_length())
        self.generation += 1


def _view_of(buffer: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    size = math.prod(shape) * kind.itemsize
    return buffer[offset : offset + size].view(kind).view(shape)
