"""Descriptor of the `flex` attention backend: PyTorch's FlexAttention, which compiles a kernel for any mask."""

from __future__ import annotations

from itertools import product
from typing import Any

from attrs import evolve

from slotline.backends.keys_ahead import KEYS_AHEAD, LIMITS
from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Choice, Flag, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")


def probe(device: DeviceInfo) -> Any:
    """Return the offer if torch can compile it: on a GPU that supports Triton, whose template needs heads of >= 16."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return f"FlexAttention is compiled by way of Triton on a GPU: {reason}"
    if device.type == "cuda":
        return evolve(descriptor.capabilities, head_sizes=Range(minimum=16))
    return descriptor.capabilities


descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="flex",
    capabilities=AttentionCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=Set((*product(FLOATS, FLOATS), *product(FLOATS, EIGHT_BITS))),
        different_value_head=Flag(True),
        layouts=Choice(("NHD", "HND")),
        sliding_window=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True, "applied to the output by the log-sum-exp"),
        alibi=Flag(True),
        keys_ahead=KEYS_AHEAD,
        limits=LIMITS,
        lse=Flag(True, "natural log; a sink counts as one more key"),
        several_plans=True,
        any_strides=True,
        priority=5,
        priority_reason="gathers the cache before it computes, and compiles for each shape of layer",
    ),
    factory="slotline.backends.flex.backend:build",
    probe="slotline.backends.flex:probe",
    summary="PyTorch's FlexAttention over gathered pages; the place to try another mask or score",
)
