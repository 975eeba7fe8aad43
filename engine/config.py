"""EngineConfig: every size and switch of one engine, checked once."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.errors import ConfigurationError

DType = Literal["float32", "bfloat16", "float16"]

MIB = 1024**2
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen; raises ConfigurationError naming the first bad field.

    `pool_bytes` is the one pool of pages that KV and adapters share. `max_batch_size` is sequences per step,
    `max_batch_tokens` the tokens that one step computes. `threads` 0 is one per core. `tokens_per_page` is the least
    length of a KV page: it is filled up to whole adapter tiles. With `prefix_cache` computed KV blocks are kept while
    there is room, and used by whoever of the same tenant has the same adapter and the same beginning.

    `device` is "cpu", "cuda" or "cuda:1". The rest matters on CUDA alone: `host_bytes` is page-locked memory in which
    adapters wait for their way to the device; with `graphs` a decode step is one recorded graph; with `batch_invariant`
    a request's tokens are the same in every batch there too, which costs speed; with `lora_stream` recorded steps
    compute part of the adapters' products beside the base model's, which changes no token.
    """

    model: Path | str
    device: str = "cpu"
    dtype: DType = "bfloat16"
    max_batch_size: int = 32
    max_batch_tokens: int = 2048
    pool_bytes: int = 1024 * MIB
    tokens_per_page: int = 16
    threads: int = 0
    prefix_cache: bool = True
    host_bytes: int = 2048 * MIB
    graphs: bool = True
    batch_invariant: bool = False
    lora_stream: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise ConfigurationError(f"dtype is {self.dtype!r}; it must be one of {', '.join(get_args(DType))}")
        for name in ("max_batch_size", "max_batch_tokens", "pool_bytes", "tokens_per_page", "host_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not DEVICE.fullmatch(self.device):
            raise ConfigurationError(f"device is {self.device!r}; it must be cpu, cuda or cuda:N")
        if self.threads < 0:
            raise ConfigurationError(f"threads is {self.threads}; it must be 0 (one per core) or more")
        if self.max_batch_tokens < self.max_batch_size:
            raise ConfigurationError(
                f"max_batch_tokens is {self.max_batch_tokens}, less than max_batch_size, {self.max_batch_size}"
            )

    @property
    def model_dir(self) -> Path:
        """The base model's Hugging Face directory."""
        return Path(self.model)

    @property
    def num_threads(self) -> int:
        """CPU threads to compute with."""
        return self.threads or len(os.sched_getaffinity(0))
