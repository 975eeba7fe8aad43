"""Kernel launches as data, so that exactly the launches that run are compiled ahead of time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | None
Constant = int | bool | str


# Explicit because Triton's default is about to change: a product and a sum may be fused, with one rounding less.
COMPILER = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid (up to three dimensions), its arguments in order, and its compile-time constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)


Runner = Callable[[Launch], None]


def run(launch: Launch) -> None:
    """Launch a kernel on the current stream; an empty grid launches nothing."""
    if all(launch.grid):
        launch.kernel[launch.grid](
            *launch.arguments,
            **launch.constants,
            **COMPILER,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


THREADS_PER_WARP = 32


def check_in_place(num_values: int, num_warps: int) -> None:
    """Assert that a kernel may load a block, change it and store it to the same addresses.

    Every thread must own different values. If a block has fewer values than threads, Triton assigns the same value to
    several threads and may load it more than once; a late thread then loads what another has already stored, and the
    change is applied twice. With at least one value per thread, every value is loaded once and stored after that.
    """
    enough = num_values >= THREADS_PER_WARP * num_warps
    assert enough, f"a block of {num_values} values is too small to be changed in place by {num_warps} warps"


def device_architecture() -> int:
    """The current device's compute capability as ten times major plus minor; 90 without a GPU."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def version(tensor: Tensor) -> int:
    """Increases whenever torch writes the tensor in place; always 0 for tensors created in inference mode."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - documented under this name; there is no public one


class Scratch:
    """Memory that operators write before they read, cached by name and doubled when a step needs more.

    Its contents do not outlive an operator. Outgrown buffers are kept, as a recorded graph may still write to them.
    With `poisoned` set, it is filled with NaN at each use, so that tests detect reads of unwritten values.
    """

    def __init__(self) -> None:
        self.poisoned = False
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: str, num_values: int, device: torch.device) -> Tensor:
        """float32 [num_values], contents undefined."""
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < num_values:
            size = num_values
            if buffer is not None:
                self._outgrown.append(buffer)
                size = max(num_values, 2 * buffer.numel())
            buffer = self._buffers[name, device] = torch.empty(size, dtype=torch.float32, device=device)
        if self.poisoned:
            buffer.fill_(float("nan"))
        return buffer[:num_values]
