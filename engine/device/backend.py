"""A backend: a device and the kernels that run on it."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.device import CpuDevice, Device, open_device
from engine.kernels import Kernels, fallback, load_cpu_kernels, load_kernels


@dataclass(frozen=True)
class Backend:
    """A device and its kernels. `is_remote`: the kernels read device memory only, so steps copy their inputs there."""

    device: Device
    kernels: Kernels
    is_remote: bool


def open_backend(config: EngineConfig) -> Backend:
    """Open the backend of the configured device; raises ConfigurationError if torch does not find it."""
    device = open_device(config.device)
    if isinstance(device, CpuDevice):
        # The C++ kernels do not support float16.
        kernels = fallback if config.dtype == "float16" else load_cpu_kernels()
        return Backend(device, kernels, is_remote=False)
    kernels = load_kernels("cuda", batch_invariant=config.batch_invariant, lora_stream=config.lora_stream)
    return Backend(device, kernels, is_remote=True)


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """The configured dtype as a torch dtype."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
