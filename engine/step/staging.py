"""All that a step needs on the device, packed into one host buffer and copied by one transfer."""

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
VIEWS_KEPT = 4096


class Staging:
    """Two host buffers, of which one is filled while the other may still be read, and one on the device.

    Arrays of the same sizes in the same order always come to lie at the same addresses, until `generation` goes up:
    then something larger than all before has come, and the buffers are new.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.generation = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._here = [self._device.host(num_bytes) for _ in range(2)]
        self._read: list[Event | None] = [None, None]
        self._turn = 0
        self._there = self._device.zeros(num_bytes)
        self._view = functools.lru_cache(VIEWS_KEPT)(functools.partial(_view_of, self._there))

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, valid for what is computed before the next call."""
        ends = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        offsets = [0, *np.cumsum(ends).tolist()]
        if offsets[-1] > len(self._there):
            self._grow(offsets[-1])
        here = self._free_buffer()
        target = here.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            target[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if offsets[-1]:
            self._device.compute.copy(self._there[: offsets[-1]], here[: offsets[-1]])
        self._read[self._turn] = self._device.compute.mark()
        return [
            self._view(offset, array.dtype.str, array.shape) for array, offset in zip(arrays, offsets, strict=False)
        ]

    def _free_buffer(self) -> Tensor:
        """The buffer that was not used last; its copy was given to the device a step ago."""
        self._turn = 1 - self._turn
        if (event := self._read[self._turn]) is not None:
            event.wait()
        return self._here[self._turn]

    def _grow(self, num_bytes: int) -> None:
        for event in self._read:
            if event is not None:
                event.wait()
        self._allocate(1 << (num_bytes - 1).bit_length())
        self.generation += 1


def _view_of(there: Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    size = math.prod(shape) * kind.itemsize
    return there[offset : offset + size].view(kind).view(shape)
