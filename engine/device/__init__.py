"""Where the engine computes: memory, streams of work, events between them, recorded work that is played again."""

from engine.device.cpu import CpuDevice
from engine.device.types import Device, Event, Stream

__all__ = ["CpuDevice", "Device", "Event", "Stream", "open_device"]


def open_device(name: str) -> Device:
    """The device of a name, "cpu", "cuda" or "cuda:1"; raises ConfigurationError where torch does not see it."""
    if name.partition(":")[0] == "cpu":
        return CpuDevice()
    from engine.device.cuda import CudaDevice

    return CudaDevice(name)
