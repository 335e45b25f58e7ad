"""Descriptor of the `triton` state backend: our own kernels for GPUs."""

from __future__ import annotations

from typing import Any

from slotline.kernels.triton_support import why_no_triton
from slotline.registry import kimi_delta
from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts.state import STATE_KINDS, StateCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if Triton's kernels can run and the GPU has bfloat16."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    if device.type == "cuda" and (device.compute_capability or (8, 0)) < (8, 0):
        return f"compute capability 8.0 or later is needed, this is {device.compute_capability}"
    return descriptor.capabilities


descriptor = Descriptor(
    kind=Kind.STATE,
    name="triton",
    capabilities=StateCapabilities(
        devices=Set(("cuda",)),
        state_kinds=Set((*STATE_KINDS, kimi_delta.NAME)),
        dtypes=Set((dtype, "float32") for dtype in ("float32", "bfloat16", "float16")),
        rollback=Flag(True),
        rollback_copy=True,
        checkpoints=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        priority=50,
        own_kinds={kimi_delta.NAME: kimi_delta.KDA},
    ),
    factory="slotline.backends.triton_state.backend:TritonState",
    probe="slotline.backends.triton_state:probe",
    summary="one kernel for a step of decoding, chunks on tensor cores for prompts; captured in graphs",
)
