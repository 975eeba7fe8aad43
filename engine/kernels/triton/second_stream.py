"""A second stream, for launches that are too small to fill a device and need nothing of what runs at the same time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Beside(Protocol):
    """Where work can go beside the current stream's."""

    def is_open(self) -> bool:
        """Whether it is worth it now."""

    def fork(self) -> AbstractContextManager[None]:
        """What is launched within starts after all work so far, and beside what the current stream is given next."""

    def join(self) -> None:
        """What the current stream is given from now on starts after what was launched in the fork."""


class SecondStream:
    """Of the current device, in recorded steps alone: there a fork is an edge of the graph.

    Outside of them it is four calls for each product, which take the host longer than they save the device.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def is_open(self) -> bool:
        """See `Beside.is_open`."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """See `Beside.fork`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """See `Beside.join`."""
        torch.cuda.current_stream().wait_stream(self._stream)
