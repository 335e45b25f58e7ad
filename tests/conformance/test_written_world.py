"""Caches of an unknown format: earlier tokens are the backend's own writes, and foreign bytes must not change."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import CacheTensor, KVCache, KVSpecCapabilities, KVSpecContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.reference.attention.backend import EagerAttention
from slotline.testing.reference.kv_spec_tensors import TensorsSpec
from slotline.testing.target import Target

FORMAT = "test_pages"
OFFER = evolve(
    reference.capabilities, cache_formats=Set((FORMAT,)), dtypes=Set((("float32", "float32"),)), lse=Flag(False)
)
SOME = {
    "attention.decode",
    "attention.mixed",
    "attention.hostile",
    "attention.pages.unread",
    "attention.write.slots",
    "attention.layers.share_plan",
    "attention.negotiation.declared",
    "attention.reuse.stale",
    "attention.stateful.decode",
    "attention.stateful.fork",
}


class Pages(TensorsSpec):
    """Each kernel block is 4-byte numbers, keys first, whose order only the backend knows."""

    def __init__(self, context: KVSpecContext) -> None:
        super().__init__(context)

    def tensors(self, layer: Any) -> tuple[CacheTensor, ...]:
        numbers = self.size * layer.num_kv_heads * (layer.head_size + layer.head_size_v)
        return (CacheTensor("page", "float32", (numbers,), per="block"),)


class Opaque(EagerAttention):
    """Keeps keys and values in reverse order of heads."""

    def parts(self, layer: Any, cache: Any) -> KVCache:
        page, size = cache["page"], self._context.kernel_block_size
        widths = [size * layer.num_kv_heads * width for width in (layer.head_size, layer.head_size_v)]
        return KVCache(*(part.unflatten(1, (size, layer.num_kv_heads, -1)) for part in page.split(widths, 1)))

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._context = context

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Any) -> None:
        super().write(layer, key.flip(1), value.flip(1), self.parts(layer, cache), plan)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any, out: Any, sinks: Any = None
    ) -> None:
        flipped = out.clone().flip(1)
        super().forward(
            layer,
            query.flip(1),
            key.flip(1),
            value.flip(1),
            self.parts(layer, cache),
            plan,
            flipped,
            None if sinks is None else sinks.flip(0),
        )
        out.copy_(flipped.flip(1))


class Spills(Opaque):
    """Writes into the null block too."""

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Any) -> None:
        super().write(layer, key, value, cache, plan)
        cache["page"][0, 0] = 1.0


class FirstLost(Opaque):
    """Forgets an element of the first token of each block."""

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Any) -> None:
        super().write(layer, key, value, cache, plan)
        cache["page"][2:, : layer.head_size] = 0.0


def outcomes(backend: type) -> dict[str, list[str]]:
    """Return the reasons of failures by check, and under "passed" the keys of what passed."""
    attention = Descriptor(kind=Kind.ATTENTION, name="opaque", capabilities=OFFER, factory=backend)
    formats = KVSpecCapabilities(
        kv_kinds=Set(("full",)), exact_kinds=Set(("full",)), page_stride=Flag(True), formats=Set((FORMAT,))
    )
    spec = Descriptor(kind=Kind.KV_SPEC, name="opaque", capabilities=formats, factory=Pages)
    found: dict[str, list[str]] = {"passed": []}
    target = Target("", attention, companion=spec)
    for record in check_plugin(target, level=Level.STATEFUL, only=lambda check: check.id in SOME, device="cpu"):
        if record.outcome is Outcome.PASSED:
            found["passed"].append(record.id)
        elif record.outcome is Outcome.FAILED:
            found.setdefault(record.id, []).append(record.reason or "")
    return found


def test_a_right_backend_with_pages_of_its_own_passes() -> None:
    found = outcomes(Opaque)
    assert found.keys() == {"passed"}
    assert set(found["passed"]) == SOME


def test_a_write_into_a_foreign_block_is_named() -> None:
    (reason, *_) = outcomes(Spills)["attention.write.slots"]
    assert reason == "writing single tokens changed block 0, which holds none of them (the null block)"


def test_a_lost_token_shows_in_the_outputs() -> None:
    found = outcomes(FirstLost)
    assert {"attention.decode", "attention.mixed", "attention.stateful.decode"} <= found.keys()
