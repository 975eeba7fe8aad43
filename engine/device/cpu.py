"""The CPU as a device: whatever is asked for has been done when the call returns."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.device.types import Event
from engine.kernels.memory import huge_zeros


class Done:
    """An event that has happened."""

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        return True

    def wait(self) -> None:
        """See `Event.wait`."""


class Immediate:
    """A stream whose work is done by the caller's thread."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Stream.copy`."""
        target.copy_(source)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """See `Stream.scatter`."""
        target.index_copy_(0, index, source)

    def mark(self) -> Event:
        """See `Stream.mark`."""
        return Done()

    def follow(self, event: Event) -> None:
        """See `Stream.follow`."""
        event.wait()


class CpuDevice:
    """Memory of this process; both streams are the calling thread, and recorded work is simply done again."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute = self.transfers = Immediate()

    def zeros(self, num_bytes: int) -> Tensor:
        """See `Device.zeros`."""
        return huge_zeros(num_bytes)

    def host(self, num_bytes: int) -> Tensor:
        """See `Device.host`."""
        return huge_zeros(num_bytes)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device.record`."""
        work()
        return work

    def forget_recordings(self) -> None:
        """See `Device.forget_recordings`: there is no memory of theirs."""

    def finish(self) -> None:
        """See `Device.finish`."""
