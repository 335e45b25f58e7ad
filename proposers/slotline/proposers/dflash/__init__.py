"""Drafter `dflash`: a few decoder layers that draft a whole block of tokens in one pass (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="dflash",
    summary="a block-diffusion head that drafts all tokens in one pass",
    capabilities=DrafterCapabilities(
        devices=Set(("cpu", "cuda")),
        max_tokens=Max(),
        needs_layers=True,
        needs_computed=True,
        needs_kv_group=True,
        block_attention="full",
        needs_checkpoint=True,
        checkpoint_form="dflash",
        on_device=True,
        prompt_embeds=Flag(True),  # it sees a prompt only as the model's hidden states
    ),
    factory="slotline.proposers.dflash.drafter:DFlashDrafter",
)
