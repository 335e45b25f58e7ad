"""Choice between the backends of a group: layers with keys and values, with latents, or with an index over latents."""

from __future__ import annotations

from slotline.backends.keys_ahead import through_torch
from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.indexed import TritonIndexed
from slotline.backends.triton.latents import TritonLatents
from slotline.registry.contracts.attention import AttentionContext


def _build(context: AttentionContext) -> TritonBackend | TritonLatents:
    if context.layers[0].index_topk is not None:
        return TritonIndexed(context)
    return TritonLatents(context) if context.layers[0].mla else TritonBackend(context)


build = through_torch(_build)
