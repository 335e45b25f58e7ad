"""Multi-token prediction as a drafter: a chain of greedy guesses, made by repeating one layer.

The layer's attention uses the model's cache like an EAGLE head: entry i is the hidden state at position i and the token
after it. Families that publish several layers train each of them for a different distance. The first layer is used.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import evolve

from slotline.proposers.eagle.drafter import EagleDrafter
from slotline.proposers.mtp.layer import MtpLayer, model_layer
from slotline.proposers.mtp.layouts import find, refuse_unread
from slotline.registry.contracts import AttentionLayer, DrafterContext, DrafterInspection, ModelFacts


class MtpDrafter(EagleDrafter):
    """Implements `Observer`. Its class is the `KVDrafterFactory`."""

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return one layer like the model's own, in the form of its cache.

        Raises:
            ModelError: if the checkpoint has no multi-token-prediction layer, or several, or one of another kind.
        """
        path = _folder(inspection.path, inspection.facts)
        find(path)
        refuse_unread(path, inspection.num_tokens)
        like = model_layer(inspection.facts)
        return (evolve(like, name="layers.0", index=0, shares_kv_with=None),)

    def _build(self, context: DrafterContext) -> torch.nn.Module:
        found = find(_folder(context.path, self._facts))
        return MtpLayer(self._facts, found, self._dtype).to(self._device)


def _folder(path: str | None, facts: ModelFacts) -> Path:
    """Return the folder of the tensors: the model's own folder, unless another is configured."""
    return facts.path if path is None else Path(path)
