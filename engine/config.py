"""EngineConfig: the settings of one engine, validated on construction."""

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
    """Settings of an engine. Frozen; raises ConfigurationError naming the first invalid field.

    `pool_bytes` is the size of the page pool that KV and adapters share. `max_batch_size` limits the sequences and
    `max_batch_tokens` the tokens computed in one step. `threads` 0 is one per core. `tokens_per_page` is the minimum
    length of a KV page, which is rounded up to whole adapter tiles. With `prefix_cache`, computed KV blocks are kept
    while there is room and reused by requests of the same tenant with the same adapter and the same prefix.

    `device` is "cpu", "cuda" or "cuda:N". The remaining fields apply to CUDA only. `host_bytes` is the size of the host
    tier: page-locked memory that caches adapters. `graphs` records decode steps as CUDA graphs. `batch_invariant` makes
    a request's tokens independent of the batch, as on the CPU, at a cost in speed. `lora_stream` computes part of the
    LoRA products of recorded steps in parallel with the base model's; it changes no token.
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
                f"max_batch_tokens is {self.max_batch_tokens}; "
                f"it must be at least max_batch_size, {self.max_batch_size}"
            )

    @property
    def model_dir(self) -> Path:
        """The base model's directory, in Hugging Face format."""
        return Path(self.model)

    @property
    def num_threads(self) -> int:
        """Number of CPU threads for computation."""
        return self.threads or len(os.sched_getaffinity(0))
