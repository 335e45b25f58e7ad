"""Choice between the two backends of a group: layers that keep keys and values, or latents."""

from __future__ import annotations

from slotline.backends.keys_ahead import through_torch
from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.latents import TritonLatents
from slotline.registry.contracts.attention import AttentionContext


def _build(context: AttentionContext) -> TritonBackend | TritonLatents:
    return TritonLatents(context) if context.layers[0].mla else TritonBackend(context)


build = through_torch(_build)
