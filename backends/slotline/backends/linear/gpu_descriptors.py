"""Descriptors of our linear plugins for GPUs, which import no torch."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Align, Flag, GraphSupport, Level, Set
from slotline.registry.contracts.experts import ExpertsCapabilities
from slotline.registry.contracts.linear import LinearCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return what Triton's products offer on a device. GPUs before 8.9 have no conversion of FP8."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    if (device.compute_capability or (9, 0)) < (8, 9):
        return evolve(triton.capabilities, schemes=Set(("int8", "int4")))
    return triton.capabilities


def probe_experts(device: DeviceInfo) -> Any:
    """Return what Triton's mixtures offer on a device."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    if (device.compute_capability or (9, 0)) < (8, 9):
        return evolve(triton_experts.capabilities, schemes=Set(("int8", "int4", "mxfp4")))
    return triton_experts.capabilities


def probe_scaled_mm(device: DeviceInfo) -> Any:
    """Return what products of FP8 offer on a device."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    if (device.compute_capability or (9, 0)) < (8, 9):
        return "products of FP8 need a GPU of compute capability 8.9"
    return scaled_mm.capabilities


triton = Descriptor(
    kind=Kind.LINEAR,
    name="triton",
    capabilities=LinearCapabilities(
        devices=Set(("cuda",)),
        dtypes=Set(("bfloat16", "float16")),
        schemes=Set(("int8", "int4", "fp8")),
        scale_groups=Align(multiple_of=32),
        offsets=Flag(True),
        in_features=Align(multiple_of=32),
        graphs=Level(GraphSupport.ALWAYS),
        priority=10,
    ),
    factory="slotline.backends.linear.triton_linear:TritonLinear",
    probe="slotline.backends.linear.gpu_descriptors:probe",
    summary="weights alone are quantized: dequantized in registers for few tokens, as a whole for many",
)
tinygemm = Descriptor(
    kind=Kind.LINEAR,
    name="tinygemm",
    capabilities=LinearCapabilities(
        devices=Set(("cuda",)),
        dtypes=Set(("bfloat16",)),
        schemes=Set(("int4",)),
        granularities=Set(("group",)),
        scale_groups=Align(exact=(32, 64, 128, 256)),
        offsets=Flag(True),
        in_features=Align(multiple_of=128),
        out_features=Align(multiple_of=8),
        graphs=Level(GraphSupport.ALWAYS),
    ),
    factory="slotline.backends.linear.tinygemm:TinygemmLinear",
    summary="PyTorch's kernel for four-bit weights: faster for two to eight tokens, slow for many",
)
scaled_mm = Descriptor(
    kind=Kind.LINEAR,
    name="scaled_mm",
    capabilities=LinearCapabilities(
        devices=Set(("cuda",)),
        dtypes=Set(("bfloat16",)),
        schemes=Set(("fp8",)),
        granularities=Set(("tensor", "channel")),
        in_features=Align(multiple_of=32),
        out_features=Align(multiple_of=16),
        activation="fp8",
        graphs=Level(GraphSupport.ALWAYS),
        priority=20,
    ),
    factory="slotline.backends.linear.triton_linear:ScaledMmLinear",
    probe="slotline.backends.linear.gpu_descriptors:probe_scaled_mm",
    summary="FP8 weights and tokens: the vendor's product for several tokens, Triton's for one",
)
triton_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="triton",
    capabilities=ExpertsCapabilities(
        devices=Set(("cuda",)),
        dtypes=Set(("bfloat16", "float16")),
        schemes=Set(("int8", "int4", "fp8", "mxfp4")),
        scale_groups=Align(multiple_of=32),
        offsets=Flag(True),
        in_features=Align(multiple_of=32),
        out_features=Align(multiple_of=64),
        activations=Set(("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")),
        bias=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        priority=-20,  # behind `dequantized` until it has been timed on a card
    ),
    factory="slotline.backends.linear.triton_experts:TritonExperts",
    probe="slotline.backends.linear.gpu_descriptors:probe_experts",
    summary="tokens sorted by expert, weights dequantized in registers in one launch for all experts",
)
