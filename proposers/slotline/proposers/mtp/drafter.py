"""Multi-token prediction as a drafter: a chain of greedy guesses, made by the one layer again and again.

The layer's attention lies in the model's cache, as an EAGLE head's does: entry i is the hidden state at position i and
the token behind it. Families that publish several layers train each for a distance of its own; the first one is taken.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import evolve

from slotline.proposers.eagle.drafter import EagleDrafter
from slotline.proposers.mtp.layer import MtpLayer, model_layer
from slotline.proposers.mtp.layouts import find
from slotline.registry.contracts import AttentionLayer, DrafterContext, DrafterInspection, ModelFacts


class MtpDrafter(EagleDrafter):
    """Implements `Observer`; its class is the `KVDrafterFactory`."""

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """One layer like the model's own, as its cache takes it.

        Raises:
            ModelError: if the checkpoint has no multi-token-prediction layer.
        """
        find(_folder(inspection.path, inspection.facts))
        like = model_layer(inspection.facts)
        return (evolve(like, name="layers.0", index=0, shares_kv_with=None),)

    def _build(self, context: DrafterContext) -> torch.nn.Module:
        found = find(_folder(context.path, self._facts))
        return MtpLayer(self._facts, found, self._dtype).to(self._device)


def _folder(path: str | None, facts: ModelFacts) -> Path:
    """Where the tensors lie: in the model's own folder, unless another is named."""
    return facts.path if path is None else Path(path)
