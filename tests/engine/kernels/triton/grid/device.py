"""A wrapper that lets tests use CPU tensors with a backend on any device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.triton.launch import Launch

FULL = os.environ.get("KERNEL_GRID") == "full"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class OnDevice:
    """Copies an operator's arguments to the device, and back after the call."""

    def __init__(self, backend: Any, device: str) -> None:
        self.backend, self.device = backend, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self.backend, name)

        def call(*arguments: Any, **named: Any) -> Any:
            moved: list[tuple[Tensor, Tensor]] = []
            result = operator(
                *(self._move(a, moved) for a in arguments), **{k: self._move(a, moved) for k, a in named.items()}
            )
            for original, copy in moved:
                original.copy_(copy)
            return self._back(result)

        return call

    def _move(self, value: Any, moved: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor) and value.device.type != self.device:
            moved.append((value, value.to(self.device)))
            return moved[-1][1]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: self._move(getattr(value, f.name), moved) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        if isinstance(value, list):
            return [self._move(one, moved) for one in value]
        return value

    def _back(self, result: Any) -> Any:
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else result


def run_here(launch: Launch) -> None:
    """Launch a kernel on the device, or in the interpreter with its memory accesses checked."""
    from engine.kernels.triton.launch import run

    if INTERPRETED:
        from tests.engine.kernels.triton.grid.watch import watched

        watched(launch)
    else:
        run(launch)


def grid(quick: list[Any], full: list[Any]) -> list[Any]:
    """The cases to run: a subset in CI, all of them with `make kernels-full` and on a GPU."""
    return full if FULL else quick


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
