"""A second stream, for launches that are too small to fill a device and independent of what runs at the same time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class SideStream(Protocol):
    """A stream on which work can run in parallel with the current stream."""

    def is_open(self) -> bool:
        """Whether forking pays off now."""

    def fork(self) -> AbstractContextManager[None]:
        """Run the block's launches after all earlier work and in parallel with the current stream's later work."""

    def join(self) -> None:
        """Later work of the current stream starts after the launches in the fork."""


class SecondStream:
    """A second stream of the current device, used only in recorded steps, where a fork is an edge of the graph.

    Outside of a graph, a fork costs four calls per product, which take the host longer than they save on the device.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def is_open(self) -> bool:
        """See `SideStream.is_open`."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """See `SideStream.fork`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """See `SideStream.join`."""
        torch.cuda.current_stream().wait_stream(self._stream)
