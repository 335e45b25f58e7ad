"""Descriptors of our communicators. This module does not import torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
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
peer: Descriptor[CommunicatorCapabilities] = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="peer",
    capabilities=CommunicatorCapabilities(
        devices=Set(("cuda",)),
        dtypes=_DTYPES,
        max_ranks=Max(8),
        graphs=Level(GraphSupport.ALWAYS),
        batch_invariant=Flag(False),
        priority=10,
    ),
    factory="slotline.plugins.communicators.peer_memory:factory",
    probe="slotline.plugins.communicators.peer_memory:probe",
    summary="sums over memory that GPUs of one host read directly, up to the size where NCCL is faster",
)
