"""Descriptor of the `torch` state backend: plain PyTorch on any device, the one that others are compared with."""

from __future__ import annotations

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.state import STATE_KINDS, StateCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.kimi_delta import KDA

descriptor = Descriptor(
    kind=Kind.STATE,
    name="torch",
    capabilities=StateCapabilities(
        devices=Set(("cpu", "cuda")),
        state_kinds=Set(STATE_KINDS),
        dtypes=Set((dtype, "float32") for dtype in ("float32", "bfloat16", "float16")),
        rollback=Flag(True),
        checkpoints=Flag(True),
        priority=10,
    ),
    factory="slotline.backends.torch_state.backend:TorchState",
    summary="chunks of a request as matrix products in float32; any device, any kind",
)

kimi_delta_descriptor = Descriptor(
    kind=Kind.STATE,
    name="torch_kda",
    capabilities=StateCapabilities(
        devices=Set(("cpu", "cuda")),
        state_kinds=Set(("kda",)),
        dtypes=Set((dtype, "float32") for dtype in ("float32", "bfloat16", "float16")),
        rollback=Flag(True),
        checkpoints=Flag(True),
        priority=10,
        own_kinds={"kda": KDA},
    ),
    factory="slotline.backends.torch_state.backend:TorchState",
    summary="Kimi Delta Attention, a kind of its own, on any device",
)
