"""Descriptors of our linear and experts plugins, which import no torch."""

from __future__ import annotations

from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts.experts import ExpertsCapabilities
from slotline.registry.contracts.linear import LinearCapabilities
from slotline.registry.contracts.weights import ELEMENTS
from slotline.registry.descriptor import Descriptor, Kind

_ANY = tuple(ELEMENTS)
_FLOATS = Set(("float32", "bfloat16", "float16"))

dequantized = Descriptor(
    kind=Kind.LINEAR,
    name="dequantized",
    capabilities=LinearCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=_FLOATS,
        schemes=Set(_ANY),
        offsets=Flag(True),
        act_order=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        priority=-10,
    ),
    factory="slotline.backends.linear.dequantized:DequantizedLinear",
    summary="any scheme: the weight is dequantized in each product, which is slow and saves memory",
)
dequantized_experts = Descriptor(
    kind=Kind.EXPERTS,
    name="dequantized",
    capabilities=ExpertsCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=_FLOATS,
        schemes=Set(_ANY),
        offsets=Flag(True),
        activations=Set(("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")),
        bias=Flag(True),
        priority=-10,
    ),
    factory="slotline.backends.linear.dequantized:DequantizedExperts",
    summary="any scheme: an expert's weights are dequantized where it is chosen",
)
