"""What an engine computes with: a device, the operators for it, and whether they can read the host's memory."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.device import CpuDevice, Device, open_device
from engine.kernels import Kernels, fallback, load_cpu_kernels, load_kernels


@dataclass(frozen=True)
class Backend:
    """`is_remote`: the operators read the device's memory alone, so that all a step needs is copied there first."""

    device: Device
    kernels: Kernels
    is_remote: bool


def open_backend(config: EngineConfig) -> Backend:
    """The backend of a configuration's device; raises ConfigurationError where torch does not see it."""
    device = open_device(config.device)
    if isinstance(device, CpuDevice):
        # float16 has no C++ kernels: torch computes it.
        kernels = fallback if config.dtype == "float16" else load_cpu_kernels()
        return Backend(device, kernels, is_remote=False)
    kernels = load_kernels("cuda", batch_invariant=config.batch_invariant, lora_stream=config.lora_stream)
    return Backend(device, kernels, is_remote=True)


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype by torch's name."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
