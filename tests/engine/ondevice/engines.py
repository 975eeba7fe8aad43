"""Engines on Triton kernels; without a GPU, on tensors of the CPU under watch, through every copy of a device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, Output, Request, SamplingParams
from engine.backend import Backend
from engine.kernels.triton import TritonKernels
from tests.engine.ondevice.pretended import HostWaits, PretendedGpu, on_pretended

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def engine_on(model: Path, adapters: list[Path], **options: Any) -> Engine:
    """An engine with adapters named by their index."""
    settings = {"dtype": "float32", "tokens_per_page": 8, "pool_bytes": 2**21, "max_batch_size": 8}
    settings |= {"host_bytes": 2**24} | options  # page-locked, by every engine
    config = EngineConfig(model, device="cpu" if INTERPRETED else "cuda", threads=1, **settings)
    backend = None
    if INTERPRETED:
        from tests.engine.kernels.triton.grid.watch import watched

        kernels = TritonKernels(on_pretended(watched), batch_invariant=config.batch_invariant)
        backend = Backend(PretendedGpu(), kernels, is_remote=True)
    engine = Engine(config, backend)
    for index, adapter in enumerate(adapters):
        engine.load_adapter(str(index), adapter)
    return engine


@contextmanager
def waits_raise() -> Iterator[None]:
    """Meanwhile RuntimeError comes of all that makes the host wait for the device, but for events."""
    if INTERPRETED:
        with HostWaits.forbidden():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def request(adapter: int | None, prompt: list[int], new: int = 2, **sampling: Any) -> Request:
    name = None if adapter is None else str(adapter)
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=3, **sampling)
    return Request(prompt_token_ids=prompt, adapter=name, sampling=params)


def seen(outputs: list[Output]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.error) for output in outputs]
