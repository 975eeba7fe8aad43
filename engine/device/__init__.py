"""The devices the engine computes on: memory, streams, events and recorded graphs."""

from engine.device.cpu import CpuDevice
from engine.device.types import Device, Event, Stream

__all__ = ["CpuDevice", "Device", "Event", "Stream", "open_device"]


def open_device(name: str) -> Device:
    """Open the device "cpu", "cuda" or "cuda:N"; raises ConfigurationError if torch does not find it."""
    if name.partition(":")[0] == "cpu":
        return CpuDevice()
    from engine.device.cuda import CudaDevice

    return CudaDevice(name)
