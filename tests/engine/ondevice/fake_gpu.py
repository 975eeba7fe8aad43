"""A fake CUDA device: tensors that report a GPU as their device and keep their values in host memory.

As with torch on a GPU, operators that mix device and host tensors raise, and so does NumPy on a device tensor. Within
`HostWaits.forbidden`, operations that would make the host wait raise. A recording contains the work submitted to the
device and none of the host's: a replay writes to the same memory with the host values of the recording.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from engine.device import Event
from engine.kernels.triton.launch import Launch, Runner

CUDA_0 = torch.device("cuda", 0)
aten = torch.ops.aten
READ_BACK = (
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default),
    *(aten.nonzero.default, aten.masked_select.default),
)


class HostWaits:
    """Whether the host may wait for the device or read values back from it."""

    allowed = True

    @classmethod
    @contextmanager
    def forbidden(cls) -> Iterator[None]:
        cls.allowed = False
        try:
            yield
        finally:
            cls.allowed = True


class Recording:
    """Work submitted to the device, for replay."""

    now: "Recording | None" = None

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._kept_alive: list[object] = []  # a graph owns its memory for as long as it lives

    def note(self, again: Callable[[], None], *keep_alive: object) -> None:
        self._work.append(again)
        self._kept_alive.append(keep_alive)

    def replay(self) -> None:
        for again in self._work:
            again()


class FakeGpuTensor(Tensor):
    """A tensor on the fake GPU; `values` is the CPU tensor with its contents."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "FakeGpuTensor":
        wrapped: FakeGpuTensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA_0,
        )
        wrapped.values = values
        return wrapped

    def __repr__(self, **_: Any) -> str:
        return f"FakeGpuTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_gpu(operator, args, kwargs or {})


def on_gpu(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as the device would, or raise as the device would."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    if operator in (aten.copy_.default, aten._to_copy.default):
        _check_copy(operator, args, kwargs)
    elif any(not isinstance(tensor, FakeGpuTensor) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, found cuda:0 and cpu")
    if operator in READ_BACK or (operator is aten.index.Tensor and any(t.dtype == torch.bool for t in tensors[1:])):
        _host_waits(str(operator))
    own_args, own_kwargs = tree_map_only(FakeGpuTensor, lambda tensor: tensor.values, (args, kwargs))
    if "device" in own_kwargs:
        own_kwargs = {**own_kwargs, "device": torch.device("cpu")}

    def compute() -> Any:
        if operator is aten.mm.dtype_out:  # torch implements it for GPUs only
            return own_kwargs["out"].copy_(own_args[0].float() @ own_args[1].float())
        return operator(*own_args, **own_kwargs)

    results = compute()
    if Recording.now is not None:
        Recording.now.note(lambda: _repeat(compute, results), own_args, own_kwargs, results)
    if kwargs.get("device", CUDA_0) != CUDA_0:
        return results
    return tree_map_only(Tensor, lambda result: _wrapped(result, tensors), results)


def _wrapped(result: Tensor, given: list[Tensor]) -> Tensor:
    """The given tensor if the result was written in place, else a new one; views share a tensor's version counter."""
    versioned = False
    for tensor in given:
        values = tensor.values if isinstance(tensor, FakeGpuTensor) else tensor
        if values is result:
            return tensor
        versioned |= (
            values.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() and not tensor.is_inference()
        )
    with torch.inference_mode(torch.is_inference_mode_enabled() and not versioned):
        return FakeGpuTensor(result)


def _repeat(compute: Callable[[], Any], results: Any) -> None:
    """Repeat an operator into the memory of its first run; views and in-place results are already there."""
    for first, now in zip(tree_flatten(results)[0], tree_flatten(compute())[0], strict=True):
        if isinstance(first, Tensor) and first.untyped_storage().data_ptr() != now.untyped_storage().data_ptr():
            first.copy_(now)


def _host_waits(what: str) -> None:
    assert Recording.now is None, f"{what} cannot be captured"
    if not HostWaits.allowed:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def _check_copy(operator: Any, args: Any, kwargs: Any) -> None:
    """A copy between host and device makes the host wait, unless the host memory is page-locked."""
    is_copy = operator is aten.copy_.default
    copies = args[:2] if is_copy else args[:1]
    host_tensors = [tensor for tensor in copies if not isinstance(tensor, FakeGpuTensor)]
    crosses = bool(host_tensors) if is_copy else kwargs.get("device", CUDA_0) != CUDA_0
    if crosses and not (is_copy and args[2:3] == (True,) and all(FakeGpu.is_locked(tensor) for tensor in host_tensors)):
        _host_waits("a copy of pageable memory")


class FakeCuda(TorchFunctionMode):
    """Creates fake tensors for device="cuda", where torch itself would look for a driver."""

    def __init__(self) -> None:
        super().__init__()
        torch._C._ensureCUDADeviceGuardSet()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = [*(a for a in args[1:] if isinstance(a, torch.device)), kwargs.get("device")]
        if not any(a is not None and torch.device(a).type == "cuda" for a in asked):
            return function(*args, **kwargs)
        kwargs.pop("device", None)
        rest = [a for a in args[1:] if not isinstance(a, torch.device)]
        if args and isinstance(args[0], FakeGpuTensor):
            return function(*args[:1], *rest, **kwargs) if rest or kwargs or function is not Tensor.to else args[0]
        if function is Tensor.to:
            _host_waits("a copy of pageable memory")
            return FakeGpuTensor(function(args[0], torch.device("cpu"), *rest, **{**kwargs, "copy": True}))
        return FakeGpuTensor(function(*args[:1], *rest, **{**kwargs, "device": "cpu"}))


class FakeStream:
    """The slowest possible stream: it reads and writes host memory only when the host waits for an event."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], None]] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        if isinstance(target, FakeGpuTensor):
            target.copy_(source, non_blocking=True)
            if not isinstance(source, FakeGpuTensor):
                self.copies.append(partial(_check_unchanged, source, source.clone()))
            return
        target.copy_(source, non_blocking=True)
        self.copies.append(partial(target.copy_, target.clone()))
        target.view(torch.uint8).fill_(0xFF)

    def scatter(self, target: Tensor, index: Tensor, source: Tensor) -> None:
        target.index_copy_(0, index, source)

    def record_event(self) -> Event:
        return FakeEvent(self, len(self.copies))

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)


def _check_unchanged(source: Tensor, sent: Tensor) -> None:
    assert torch.equal(source, sent), "host memory was written before the device had read it"


class FakeEvent:
    """An event that is not done the first time it is queried."""

    def __init__(self, stream: FakeStream, count: int) -> None:
        self._stream, self._count, self._asked = stream, count, False

    def is_done(self) -> bool:
        if self._asked:
            self.wait()
        asked, self._asked = self._asked, True
        return asked

    def wait(self) -> None:
        for index in range(self._count):
            self._stream.copies[index]()
            self._stream.copies[index] = _nothing


def _nothing() -> None:
    """Replaces a copy that has been done."""


class FakeGpu:
    """A `Device` that behaves like `engine.device.cuda.CudaDevice`."""

    _locked: ClassVar[list[Tensor]] = []  # never freed, so that no later tensor gets one of their addresses

    def __init__(self) -> None:
        self.torch_device = CUDA_0
        self.compute, self.transfers = FakeStream(), FakeStream()

    @classmethod
    def is_locked(cls, tensor: Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        return any(pointer == memory.untyped_storage().data_ptr() for memory in cls._locked)

    def zeros(self, num_bytes: int) -> Tensor:
        return FakeGpuTensor(torch.zeros(num_bytes, dtype=torch.uint8))

    def host(self, num_bytes: int) -> Tensor:
        memory = torch.zeros(max(num_bytes, 1), dtype=torch.uint8)
        self._locked.append(memory)
        return memory[:num_bytes]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        recording = Recording.now = Recording()
        try:
            work()
        finally:
            Recording.now = None
        return recording.replay

    def discard_recordings(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeSecondStream:
    """A second stream in recordings: between fork and join no kernel may touch what the other stream writes.

    Its kernels run at the join, as late as a GPU may run them, and at the same place in a replay.
    """

    def __init__(self) -> None:
        self.forks = 0
        self.waiting: list[Callable[[], None]] | None = None
        self._inside = False

    def is_open(self) -> bool:
        return Recording.now is not None

    @contextmanager
    def fork(self) -> Iterator[None]:
        assert self.waiting is None, "forked again before the join"
        self.forks += 1
        self.waiting, self._inside = [], True
        try:
            yield
        finally:
            self._inside = False

    def join(self) -> None:
        assert self.waiting is not None
        waiting, self.waiting = self.waiting, None
        for start in waiting:
            start()

    def later(self, run: Runner) -> Runner:
        """A runner that defers launches within a fork until the join."""

        def start(launch: Launch) -> None:
            if self._inside and self.waiting is not None:
                self.waiting.append(lambda: run(launch))
            else:
                run(launch)

        return start


def on_fake_gpu(run: Runner) -> Runner:
    """A kernel runner that accepts tensors on the fake GPU only."""

    def start(launch: Launch) -> None:
        for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=False):
            assert not isinstance(value, Tensor) or isinstance(value, FakeGpuTensor), (
                f"{launch.name}: {name} is not on the GPU"
            )
        own = replace(
            launch, arguments=tuple(a.values if isinstance(a, FakeGpuTensor) else a for a in launch.arguments)
        )
        run(own)
        if Recording.now is not None:
            Recording.now.note(lambda: run(own), own)

    return start
