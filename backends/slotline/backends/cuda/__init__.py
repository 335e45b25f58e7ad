"""Descriptor of the `cuda` device: NVIDIA GPUs, by torch, CUDA graphs and Triton."""

from slotline.registry.capability import Flag
from slotline.registry.contracts.device import DeviceCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DEVICE,
    name="cuda",
    capabilities=DeviceCapabilities(
        graphs=Flag(True),
        streams=Flag(True),
        peer_copies=Flag(True),
        pinned_memory=Flag(True),
        priority=100,
    ),
    factory="slotline.backends.cuda.device:factory",
    summary="NVIDIA GPUs, with CUDA graphs and Triton's kernels",
)
