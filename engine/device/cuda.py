"""A CUDA GPU: two streams, page-locked host memory and CUDA graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.device.types import Event
from engine.errors import ConfigurationError


class CudaEvent:
    """An event without timing, used for ordering only."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Event.wait`."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Stream.copy`: asynchronous, because the host memory is page-locked."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """See `Stream.scatter`."""
        with torch.cuda.stream(self._stream):
            target.index_copy_(0, index, source)

    def record_event(self) -> Event:
        """See `Stream.record_event`."""
        return CudaEvent(self._stream)

    def wait_for(self, event: Event) -> None:
        """See `Stream.wait_for`."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)


class CudaDevice:
    """One GPU. It becomes the thread's current device; kernels are launched on its current stream, `compute`."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError(f"device is {name!r}, but torch finds no CUDA device; set it to 'cpu'")
        where = torch.device(name)
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        if self.torch_device.index >= torch.cuda.device_count():
            raise ConfigurationError(f"device is {name!r}, but torch finds {torch.cuda.device_count()} CUDA device(s)")
        torch.cuda.set_device(self.torch_device)
        self.compute = CudaStream(torch.cuda.current_stream())
        self.transfers = CudaStream(torch.cuda.Stream())
        # Not torch's shared capture stream: destroying a graph clears the cuBLAS workspaces of all its stream's graphs.
        self._capturing = torch.cuda.Stream()
        self._graph_memory = torch.cuda.graph_pool_handle()

    def zeros(self, num_bytes: int) -> Tensor:
        """See `Device.zeros`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def host(self, num_bytes: int) -> Tensor:
        """See `Device.host`: page-locked."""
        return torch.zeros(max(num_bytes, 1), dtype=torch.uint8, pin_memory=True)[:num_bytes]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device.record`: a CUDA graph. The work runs once eagerly, to compile and allocate, and is then captured.

        If the capture fails, its memory pool is not used again.
        """
        work()
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._graph_memory, self._capturing
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self.discard_recordings()
            raise
        return graph.replay

    def discard_recordings(self) -> None:
        """See `Device.discard_recordings`: torch refuses to capture into a pool that no graph uses any longer."""
        self._graph_memory = torch.cuda.graph_pool_handle()

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self.torch_device)
