"""How a kernel is started: one record of all that a launch needs, so that what runs is what is compiled ahead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | None
Constant = int | bool | str


# Said outright, as the default of Triton is about to change: products and sums may be fused, which rounds once less.
COMPILER = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid (up to three dimensions), its arguments in order, and what is fixed when it is compiled."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return str(self.kernel.__name__)


Runner = Callable[[Launch], None]


def run(launch: Launch) -> None:
    """Start a kernel on the current stream; an empty grid starts nothing."""
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
    """What a kernel takes for granted that loads a block, changes it and stores it to the same cells.

    Each of its threads must have values of its own. Of a block with fewer values than threads Triton gives the same
    value to several of them, and may load it more than once; a late one then loads what another has already stored, and
    the change is made twice. With a value or more for each thread every cell is loaded once, and stored after that.
    """
    assert num_values >= THREADS_PER_WARP * num_warps, f"{num_values} values are changed in place by {num_warps} warps"


def device_architecture() -> int:
    """The current device's compute capability as ten times major plus minor; 90 where there is no GPU."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def version(tensor: Tensor) -> int:
    """Goes up whenever torch writes the tensor in place; torch keeps no count of tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch documents it under this name and offers no other


class Scratch:
    """Memory that operators write before they read, kept by name and doubled when a step needs more.

    Nothing in it outlives an operator. What was outgrown is kept as well: a recorded graph may still write there.
    Raising `poisoned` fills it with NaN at each use, so that tests see a read of what was not written.
    """

    def __init__(self) -> None:
        self.poisoned = False
        self._held: dict[tuple[str, torch.device], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def take(self, name: str, num_values: int, device: torch.device) -> Tensor:
        """float32 [num_values], contents undefined."""
        held = self._held.get((name, device))
        if held is None or held.numel() < num_values:
            size = num_values
            if held is not None:
                self._outgrown.append(held)
                size = max(num_values, 2 * held.numel())
            held = self._held[name, device] = torch.empty(size, dtype=torch.float32, device=device)
        if self.poisoned:
            held.fill_(float("nan"))
        return held[:num_values]
