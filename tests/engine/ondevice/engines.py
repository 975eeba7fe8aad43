"""Builds engines on Triton kernels; without a GPU, on a fake one, with every memory access of the kernels checked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, Output, Request, SamplingParams
from engine.device.backend import Backend, open_backend
from engine.kernels.triton import TritonKernels, launch
from engine.kernels.triton.launch import Launch, Runner
from tests.engine.ondevice.fake_gpu import FakeGpu, FakeSecondStream, HostWaits, on_fake_gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def engine_on(model: Path, adapters: list[Path], **options: Any) -> Engine:
    """An engine with adapters loaded under their indices as names."""
    settings = {"dtype": "float32", "tokens_per_page": 8, "pool_bytes": 2**21, "max_batch_size": 8}
    settings |= {"host_bytes": 2**24} | options  # page-locked, by every engine
    config = EngineConfig(model, device="cuda", threads=1, **settings)
    engine = Engine(config, backend_for(config))
    for index, adapter in enumerate(adapters):
        engine.load_adapter(str(index), adapter)
    return engine


def backend_for(config: EngineConfig, run: Runner | None = None) -> Backend:
    """A backend on the GPU or a fake one. Kernels are launched by `run`; by default, interpreted ones are watched."""
    if not INTERPRETED:
        backend = open_backend(config)
        if run is None:
            return backend
        return replace(backend, kernels=TritonKernels(run, batch_invariant=config.batch_invariant))
    if run is None:
        from tests.engine.kernels.triton.grid.watch import watched as run
    second_stream = FakeSecondStream() if config.lora_stream else None
    start = on_fake_gpu(run) if second_stream is None else second_stream.later(on_fake_gpu(run))
    kernels = TritonKernels(start, batch_invariant=config.batch_invariant, second_stream=second_stream)
    return Backend(FakeGpu(), kernels, is_remote=True)


def sampling_only(run: Runner = launch.run) -> Runner:
    """A runner that launches only the sampling kernels; the results of the others do not affect what is launched."""

    def start(given: Launch) -> None:
        if given.name in ("logit_stats", "count_likeliest", "draw"):
            run(given)

    return start


def without_logits(engine: Engine, rows: int) -> Engine:
    """Zero the logits, which would be uninitialized memory if the kernels that compute them are not launched."""
    sampled = engine._decoder._workspace.sampled(rows)
    sampled.normed.zero_()
    sampled.logits.zero_()
    return engine


@contextmanager
def waits_raise() -> Iterator[None]:
    """Raise RuntimeError for everything that makes the host wait for the device, except events."""
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


def observed(outputs: list[Output]) -> list[object]:
    return [(output.token_ids, output.logprobs, output.error) for output in outputs]
