"""Descriptors of our linear and experts plugins, which import no torch."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.registry.capability import Align, Flag, GraphSupport, Level, Set
from slotline.registry.contracts.experts import ExpertsCapabilities
from slotline.registry.contracts.linear import LinearCapabilities
from slotline.registry.contracts.weights import ELEMENTS
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

_ANY = tuple(ELEMENTS)
_ACTIVATIONS = Set(("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"))
_FLOATS = Set(("float32", "bfloat16", "float16"))


def probe_dequantized(device: DeviceInfo) -> Any:
    """Return what dequantized products offer on a device. Tiles of rows are shown to be invariant on CPUs."""
    if "cpu" in (device.type, *device.compatible_with):
        return dequantized.capabilities
    return evolve(dequantized.capabilities, batch_invariant=Flag(False))


def probe_vnni(device: DeviceInfo) -> Any:
    """Return what products of rounded activations offer on a device."""
    return _with_vnni(vnni)


def probe_vnni_experts(device: DeviceInfo) -> Any:
    """Return what mixtures of rounded activations offer on a device."""
    return _with_vnni(vnni_experts)


def _with_vnni(descriptor: Descriptor[Any]) -> Any:
    from slotline.backends.linear.vnni_kernels import lanes

    return descriptor.capabilities if lanes() else "this processor has neither AVX-512 VNNI nor AVX-VNNI"


def _of_products(linear: Descriptor[LinearCapabilities]) -> ExpertsCapabilities:
    """Return what a mixture of a linear plugin's products offers."""
    offer = linear.capabilities
    return ExpertsCapabilities(
        devices=offer.devices,
        dtypes=offer.dtypes,
        schemes=offer.schemes,
        scale_groups=offer.scale_groups,
        offsets=offer.offsets,
        in_features=offer.in_features,
        out_features=Align(multiple_of=64),  # half of them are the inputs of the second product
        activations=_ACTIVATIONS,
        bias=Flag(True),
        activation=offer.activation,
        priority=offer.priority,
    )


dequantized = Descriptor(
    kind=Kind.LINEAR,
    name="dequantized",
    capabilities=LinearCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=_FLOATS,
        schemes=Set(_ANY),
        ragged=Flag(True),
        offsets=Flag(True),
        act_order=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        batch_invariant=Flag(True, "on a CPU, in tiles of 16 tokens"),
        priority=-10,
    ),
    factory="slotline.backends.linear.dequantized:DequantizedLinear",
    probe="slotline.backends.linear.descriptors:probe_dequantized",
    summary="any scheme: the weight is dequantized in each product, which is slow and saves memory",
)
numba = Descriptor(
    kind=Kind.LINEAR,
    name="numba",
    capabilities=LinearCapabilities(
        devices=Set(("cpu",)),
        dtypes=_FLOATS,
        schemes=Set(("int8", "int6", "int4", "fp8")),
        scale_groups=Align(exact=(16,), multiple_of=32),
        offsets=Flag(True),
        act_order=Flag(True),
        split_order=Flag(False, "groups have equal numbers of inputs"),
        in_features=Align(multiple_of=32),
        priority=10,
    ),
    factory="slotline.backends.linear.numba_linear:NumbaLinear",
    summary="int8, int6, int4 and fp8: codes are widened while they are read, compiled by numba",
)
vnni = Descriptor(
    kind=Kind.LINEAR,
    name="vnni",
    capabilities=LinearCapabilities(
        devices=Set(("cpu",)),
        dtypes=_FLOATS,
        schemes=Set(("int8", "int6", "int4", "mxfp4")),
        scale_groups=Align(exact=(8, 16), multiple_of=32),
        offsets=Flag(True),
        act_order=Flag(True),
        split_order=Flag(False, "groups have equal numbers of inputs"),
        in_features=Align(multiple_of=32),
        activation="int8",
        rounded_inputs=Flag(True, "but with act order"),
        batch_invariant=Flag(True, "sums of a group are exact, and groups are added in order"),
        priority=20,
    ),
    factory="slotline.backends.linear.vnni_linear:VnniLinear",
    probe="slotline.backends.linear.descriptors:probe_vnni",
    summary="int8, int6, int4 and mxfp4 by the processor's dot product of bytes: activations are rounded to int8",
)
torch_int8 = Descriptor(
    kind=Kind.LINEAR,
    name="torch_int8",
    capabilities=LinearCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set(("bfloat16",)),
        schemes=Set(("int8",)),
        granularities=Set(("tensor", "channel")),
        in_features=Align(multiple_of=32),
        out_features=Align(multiple_of=32),
    ),
    factory="slotline.backends.linear.torch_packed:TorchInt8",
    summary="int8 per output by torch's packed CPU kernel",
)
torch_int4 = Descriptor(
    kind=Kind.LINEAR,
    name="torch_int4",
    capabilities=LinearCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set(("bfloat16",)),
        schemes=Set(("int4",)),
        granularities=Set(("group",)),
        scale_groups=Align(exact=(32, 64, 128, 256)),
        offsets=Flag(True),
        in_features=Align(multiple_of=32),
        out_features=Align(multiple_of=32),
    ),
    factory="slotline.backends.linear.torch_packed:TorchInt4",
    summary="int4 in groups by torch's packed CPU kernel",
)
dequantized_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="dequantized",
    capabilities=ExpertsCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=_FLOATS,
        schemes=Set(_ANY),
        ragged=Flag(True),
        offsets=Flag(True),
        activations=_ACTIVATIONS,
        bias=Flag(True),
        priority=-10,
    ),
    factory="slotline.backends.linear.dequantized:DequantizedExperts",
    summary="any scheme: an expert's weights are dequantized where it is chosen",
)
numba_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="numba",
    capabilities=_of_products(numba),
    factory="slotline.backends.linear.linear_experts:numba_experts",
    summary="int8, int6, int4 and fp8: an expert's codes are widened while they are read, compiled by numba",
)
vnni_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="vnni",
    capabilities=_of_products(vnni),
    factory="slotline.backends.linear.linear_experts:vnni_experts",
    probe="slotline.backends.linear.descriptors:probe_vnni_experts",
    summary="int8, int6, int4 and mxfp4 by the processor's dot product of bytes: activations are rounded to int8",
)
