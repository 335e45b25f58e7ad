"""Descriptor of the `acme` device. Nothing here imports torch."""

from slotline.registry import Descriptor, Flag, Kind
from slotline.registry.contracts import DeviceCapabilities

descriptor = Descriptor(
    kind=Kind.DEVICE,
    name="acme",
    capabilities=DeviceCapabilities(
        graphs=Flag(True, "recorded operations"),
        compatible_with=("cpu",),  # its tensors are the host's, so kernels for a CPU serve them
        priority=-1,  # `auto` never takes it
    ),
    factory="acme_device.device:factory",
    summary="the host's memory under another name",
)
