"""Drafter `mtp`: the multi-token-prediction layer that ships inside the served model's own checkpoint."""

from __future__ import annotations

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="mtp",
    summary="the multi-token-prediction layer of the model's own checkpoint",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_hidden_states=True,
        needs_computed=True,
        needs_kv_group=True,
        on_device=True,
        graphs=Flag(True),  # the layer is of the model's own kind: what forbids its capture forbids the model's
        prompt_embeds=Flag(True),
    ),
    factory="slotline.proposers.mtp.drafter:MtpDrafter",
)
