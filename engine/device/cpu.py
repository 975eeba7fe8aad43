"""The CPU as a device. All work is synchronous."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.device.types import Event
from engine.kernels.memory import huge_zeros


class CompletedEvent:
    """An event that is always complete."""

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        return True

    def wait(self) -> None:
        """See `Event.wait`."""


class SynchronousStream:
    """A stream that runs its work in the calling thread."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Stream.copy`."""
        target.copy_(source)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """See `Stream.scatter`."""
        target.index_copy_(0, index, source)

    def record_event(self) -> Event:
        """See `Stream.record_event`."""
        return CompletedEvent()

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""
        event.wait()


class CpuDevice:
    """Uses the process's own memory; both streams run in the calling thread, and a replay repeats the work."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute = self.transfers = SynchronousStream()

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

    def discard_recordings(self) -> None:
        """See `Device.discard_recordings`: recordings own no memory."""

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
