"""The device interface. Outside the kernels, the engine uses CUDA only through these protocols."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """True once all work before the event is done; never blocks."""

    def wait(self) -> None:
        """Block the calling thread until all work before the event is done."""


class Stream(Protocol):
    """Work that a device executes in order, asynchronously to the caller."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source. Host memory must come from `Device.host` and not be modified before the copy's event."""

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target[index[i]] = source[i] along the first dimension; all tensors are on the device, index is int64."""

    def record_event(self) -> Event:
        """Return an event after all work submitted so far."""

    def wait_for(self, event: Event) -> None:
        """Make work submitted from now on wait for the event, without blocking the caller."""


class Device(Protocol):
    """A device with memory and two streams: `compute` for steps and `transfers` for loading adapters."""

    torch_device: torch.device

    @property
    def compute(self) -> Stream:
        """The stream that runs steps."""

    @property
    def transfers(self) -> Stream:
        """The stream that loads adapters."""

    def zeros(self, num_bytes: int) -> Tensor:
        """Allocate zeroed device memory: uint8 [num_bytes]."""

    def host(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can copy from and to asynchronously: uint8 [num_bytes]."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once and return a function that replays it on the same memory with less host overhead."""

    def discard_recordings(self) -> None:
        """Release the memory of recordings; called after all of them have been dropped."""

    def synchronize(self) -> None:
        """Block until the device has finished all submitted work."""
