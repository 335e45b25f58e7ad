"""Tokens grouped by adapter, and two products for each group and module."""

from __future__ import annotations

import torch
from torch.nn import functional

from slotline.plugins.lora.peft_folder import PeftAdapter, Share
from slotline.plugins.lora.slots import AdapterSlots
from slotline.registry.contracts import LoraContext

TILE = 16
"""Rows of a product where numbers must not hang on the batch: a matrix library chooses its kernel by their number."""


class GroupedLora(AdapterSlots):
    """Implements `slotline.registry.contracts.lora.Lora` in plain torch.

    Adapters are on the device in their own rank, unpadded. Modules without an adapter cost nothing.
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
            embeds = module in self.context.embeddings
            inner = share.a[own] if embeds else self._product(own, share.a)  # [n, rank]
            added = self._product(inner * share.scale, share.b).to(out.dtype)  # [n, out_features]
            if tokens is None:
                out += added
            else:
                out.index_add_(0, tokens, added)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ weight.T``, [n, in_features] to [n, out_features]."""
        if not self.context.batch_invariant:
            return rows @ weight.T
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
        return torch.cat([tile @ weight.T for tile in padded.split(TILE)])[: len(rows)]

    def _write(self, slot: int, adapter: PeftAdapter) -> None:
        self._shares[slot] = {module: self._placed(module, share) for module, share in adapter.shares.items()}

    def _placed(self, module: str, share: Share) -> Share:
        """Return the weights on the device. An embedding's A is stored as a table [rows, rank]."""
        a = share.a.T.contiguous() if module in self.context.embeddings else share.a
        device = self.context.device
        return Share(a.to(device, self._dtype), share.b.to(device, self._dtype), share.scale)

    def _clear(self, slot: int) -> None:
        del self._shares[slot]
