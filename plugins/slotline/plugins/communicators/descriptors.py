"""Descriptors of our communicators. This module does not import torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts.communicator import CommunicatorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

_DTYPES = Set(("float32", "bfloat16", "float16"))

gloo: Descriptor[CommunicatorCapabilities] = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="gloo",
    capabilities=CommunicatorCapabilities(devices=Set(("cpu",)), dtypes=_DTYPES, batch_invariant=Flag(True)),
    factory="slotline.plugins.communicators.torch_group:gloo",
    summary="torch.distributed's collectives among CPUs",
)
nccl: Descriptor[CommunicatorCapabilities] = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="nccl",
    capabilities=CommunicatorCapabilities(
        devices=Set(("cuda",)), dtypes=_DTYPES, graphs=Level(GraphSupport.ALWAYS), batch_invariant=Flag(False)
    ),
    factory="slotline.plugins.communicators.torch_group:nccl",
    summary="torch.distributed's collectives among NVIDIA GPUs",
)
