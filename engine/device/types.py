"""The seam between the engine and what it computes on; the engine knows of CUDA what stands here."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """True once all work before it has been done; never waits."""

    def wait(self) -> None:
        """Hold the calling thread until then."""


class Stream(Protocol):
    """Work that a device does in order, while the caller goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source; host memory is of `Device.host`, and stays as it is until an event says that it was read."""

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """target[index[i]] = source[i] along the first dimension; all on the device, index is int64."""

    def mark(self) -> Event:
        """An event after all work so far."""

    def follow(self, event: Event) -> None:
        """What is given from now on starts after the event; the caller does not wait."""


class Device(Protocol):
    """A place with memory and two streams: `compute` for steps, `transfers` for adapters on their way."""

    torch_device: torch.device

    @property
    def compute(self) -> Stream:
        """Where steps run."""

    @property
    def transfers(self) -> Stream:
        """Where adapters come in."""

    def zeros(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the device's memory, zero."""

    def host(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that the device copies from and to by itself."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work once and return what does the same again on the same memory, for less of the host's time."""

    def forget_recordings(self) -> None:
        """All that was recorded has been dropped: the memory it worked in is not used for what is recorded next."""

    def finish(self) -> None:
        """Hold the caller until all that was given to the device has been done."""
