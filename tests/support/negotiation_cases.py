"""Small builders for negotiation tests: layers, candidates and requests with everything plain but what a test names."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts.attention import AttentionCapabilities, AttentionLayer
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.negotiation import Asked, Candidate, PlanRequest, group_layers

CPU = DeviceInfo(type="cpu", name="a laptop", cores=8)
GPU = DeviceInfo(type="cuda", name="H200", compute_capability=(9, 0), cores=132)

PLAIN = AttentionCapabilities(
    devices=Set(("cpu", "cuda")),
    dtypes=Set((("float32", "float32"),)),
    sliding_window=Flag(True),
    graphs=Level(GraphSupport.ALWAYS),
)
FULL_SPEC = KVSpecCapabilities(kv_kinds=Set(("full", "sliding")), exact_kinds=Set(("full",)))
SLIDING_SPEC = KVSpecCapabilities(kv_kinds=Set(("sliding",)), exact_kinds=Set(("sliding",)))


def layer(index: int = 0, **changes: Any) -> AttentionLayer:
    """A decoder layer: 8 query heads on 2 KV heads of size 64."""
    plain = AttentionLayer(
        name=f"layers.{index}.attn",
        index=index,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
        scale=0.125,
    )
    return evolve(plain, **changes)


def sliding(index: int = 0, window: int = 512, **changes: Any) -> AttentionLayer:
    """A layer with a window."""
    return layer(index, window=window, kv_kind="sliding", **changes)


def backend(name: str, version: str = "1.0", **changes: Any) -> Candidate:
    """A backend that can do everything plain, changed as said."""
    descriptor = Descriptor(
        kind=Kind.ATTENTION, name=name, capabilities=evolve(PLAIN, **changes), factory="nowhere:nothing"
    )
    return Candidate(descriptor=descriptor, distribution=f"dist-{name}", version=version)


def spec(name: str, capabilities: KVSpecCapabilities = FULL_SPEC, **changes: Any) -> Candidate:
    """A cache spec."""
    descriptor = Descriptor(
        kind=Kind.KV_SPEC, name=name, capabilities=evolve(capabilities, **changes), factory="nowhere:nothing"
    )
    return Candidate(descriptor=descriptor, distribution="slotline", version="0.1.0")


FULL = spec("full")
SLIDING = spec("sliding", SLIDING_SPEC)


def request(*layers: AttentionLayer, device: DeviceInfo = CPU, **changes: Any) -> PlanRequest:
    """A request for some layers; two plain ones where none are given."""
    return PlanRequest(device=device, groups=group_layers(layers or (layer(0), layer(1))), **changes)


def explicit(value: Any, where: str = "run.toml:1") -> Asked[Any]:
    """A value from the file."""
    return Asked(value, where, True)
