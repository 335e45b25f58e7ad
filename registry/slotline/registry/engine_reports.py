"""Reports of an engine: the memory that it takes, and what capturing its graphs took."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen


@frozen(kw_only=True)
class DeviceMemory:
    """Memory use of one device, in bytes.

    Attributes:
        device: torch device string.
        total: of the device.
        activations: peak of a profiling step beyond the weights.
        cache: its part of the pool.
        block: one block over the layers on the device.
    """

    device: str
    total: int
    activations: int = 0
    cache: int = 0
    block: int


@frozen(kw_only=True)
class MemoryReport:
    """Memory use in bytes over all devices.

    Attributes:
        devices: the memory use of each device.
        states: bytes of all state slots.
        checkpoints: number of these slots that hold checkpoints.
        num_blocks: blocks in the pool, including the null block.
    """

    devices: tuple[DeviceMemory, ...]
    num_blocks: int
    states: int = 0
    checkpoints: int = 0

    @property
    def total(self) -> int:
        """Return the devices' total memory."""
        return sum(device.total for device in self.devices)

    @property
    def activations(self) -> int:
        """Return the peak of a profiling step beyond the weights."""
        return sum(device.activations for device in self.devices)

    @property
    def cache(self) -> int:
        """Return the bytes of the pool."""
        return sum(device.cache for device in self.devices)

    @property
    def block(self) -> int:
        """Return the bytes of one block over all layers."""
        return sum(device.block for device in self.devices)


@frozen(kw_only=True)
class CaptureReport:
    """Time and memory that capturing took.

    Attributes:
        shapes: captured shapes.
        graphs: graphs of these shapes, more than shapes if attention breaks them.
        memory: bytes of device memory.
        seconds: wall-clock time.
    """

    shapes: int = 0
    graphs: int = 0
    memory: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return asdict(self)
