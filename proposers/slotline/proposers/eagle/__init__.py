"""Drafters `eagle` and `eagle3`: one decoder layer that goes on from the model's own hidden states."""

from __future__ import annotations

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="eagle",
    summary="an EAGLE head over the last hidden states",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_hidden_states=True,
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        on_device=True,
        graphs=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.proposers.eagle.drafter:EagleDrafter",
)
descriptor_3 = Descriptor(
    kind=Kind.DRAFTER,
    name="eagle3",
    summary="an EAGLE-3 head over hidden states of three layers",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_layers=True,
        needs_computed=True,
        needs_kv_group=True,
        needs_checkpoint=True,
        on_device=True,
        graphs=Flag(True),
        prompt_embeds=Flag(True),
    ),
    factory="slotline.proposers.eagle.drafter:Eagle3Drafter",
)
