"""A CUDA GPU: two streams, page-locked host memory, captured graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.device.types import Event
from engine.errors import ConfigurationError


class CudaEvent:
    """An event that only orders work: it takes no time stamp."""

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
    """One of the device's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Stream.copy`: cudaMemcpyAsync, as the host's side is page-locked."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        """See `Stream.scatter`."""
        with torch.cuda.stream(self._stream):
            target.index_copy_(0, index, source)

    def mark(self) -> Event:
        """See `Stream.mark`."""
        return CudaEvent(self._stream)

    def follow(self, event: Event) -> None:
        """See `Stream.follow`."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)


class CudaDevice:
    """One GPU, which becomes the thread's current device: its kernels go to the current stream, `compute`."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError(f"device is {name!r}, but torch sees no CUDA device here; set it to 'cpu'")
        where = torch.device(name)
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        if self.torch_device.index >= torch.cuda.device_count():
            raise ConfigurationError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices here")
        torch.cuda.set_device(self.torch_device)
        self.compute = CudaStream(torch.cuda.current_stream())
        self.transfers = CudaStream(torch.cuda.Stream())
        # Not torch's one for all captures: a graph that ends clears the cuBLAS workspaces of all graphs of its stream.
        self._capturing = torch.cuda.Stream()
        self._graph_memory = torch.cuda.graph_pool_handle()

    def zeros(self, num_bytes: int) -> Tensor:
        """See `Device.zeros`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def host(self, num_bytes: int) -> Tensor:
        """See `Device.host`: page-locked."""
        return torch.zeros(max(num_bytes, 1), dtype=torch.uint8, pin_memory=True)[:num_bytes]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device.record`: a CUDA graph. The first call is for real: it compiles and sizes what the second uses.

        What fails in the second is raised; the memory of a capture that failed is not used for another.
        """
        work()
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._graph_memory, self._capturing
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self.forget_recordings()
            raise
        return graph.replay

    def forget_recordings(self) -> None:
        """See `Device.forget_recordings`: torch refuses to capture into a pool that no graph uses any more."""
        self._graph_memory = torch.cuda.graph_pool_handle()

    def finish(self) -> None:
        """See `Device.finish`."""
        torch.cuda.synchronize(self.torch_device)
