"""Descriptor of the CPU."""

from slotline.registry.capability import Flag
from slotline.registry.contracts.device import DeviceCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DEVICE,
    name="cpu",
    capabilities=DeviceCapabilities(graphs=Flag(False), host_memory=Flag(True)),
    options="slotline.kernels.cpu_threads:CpuOptions",
    factory="slotline.core.device.cpu:factory",
    summary="the host's processor",
)
