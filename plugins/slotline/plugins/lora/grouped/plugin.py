"""Tokens grouped by adapter, and two products for each group and module."""

from __future__ import annotations

import torch

from slotline.plugins.lora.peft_folder import PeftAdapter, Share
from slotline.plugins.lora.slots import AdapterSlots
from slotline.registry.contracts import LoraContext


class GroupedLora(AdapterSlots):
    """Implements `slotline.registry.contracts.lora.Lora` in plain torch.

    Adapters lie on the device in their own rank, unpadded; modules that an adapter leaves alone cost nothing.
    """

    def __init__(self, context: LoraContext) -> None:
        super().__init__(context)
        self._dtype = getattr(torch, context.dtype)
        self._shares: dict[int, dict[str, Share]] = {}
        # slot -> which tokens; None where all of the batch have the slot
        self._groups: list[tuple[int, torch.Tensor | None]] = []

    def plan(self, slots: torch.Tensor) -> None:
        """See `Lora.plan`: reads the slots on the host, so on a GPU it waits for them."""
        used = sorted(set(slots.tolist()) - {-1})
        if len(used) == 1 and bool((slots == used[0]).all()):
            self._groups = [(used[0], None)]
        else:
            self._groups = [(slot, (slots == slot).nonzero()[:, 0]) for slot in used]

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See `Lora.apply`."""
        for slot, tokens in self._groups:
            share = self._shares.get(slot, {}).get(module)
            if share is None:
                continue
            own = inputs if tokens is None else inputs[tokens]
            inner = share.a[own] if module in self.context.embeddings else own @ share.a.T  # [n, rank]
            added = ((inner * share.scale) @ share.b.T).to(out.dtype)  # [n, out_features]
            if tokens is None:
                out += added
            else:
                out.index_add_(0, tokens, added)

    def _write(self, slot: int, adapter: PeftAdapter) -> None:
        self._shares[slot] = {module: self._placed(module, share) for module, share in adapter.shares.items()}

    def _placed(self, module: str, share: Share) -> Share:
        """The share on the device; an embedding's A lies as a table [rows, rank]."""
        a = share.a.T.contiguous() if module in self.context.embeddings else share.a
        device = self.context.device
        return Share(a.to(device, self._dtype), share.b.to(device, self._dtype), share.scale)

    def _clear(self, slot: int) -> None:
        del self._shares[slot]
