"""Drafter `draft_model`: a smaller model of the same vocabulary, which writes ahead."""

from __future__ import annotations

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="draft_model",
    summary="a smaller model of the same vocabulary",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        on_device=True,
        catches_up=True,
        graphs=Flag(True),
    ),
    factory="slotline.proposers.draft_model.drafter:ModelDrafter",
)
