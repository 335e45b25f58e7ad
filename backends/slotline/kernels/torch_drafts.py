"""Operations of steps with drafts in torch, for any device. They define what every other implementation gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.registry.contracts.device import DraftPlaces, Verified

_NULL_BLOCK = 0


class TorchDraftOps:
    """The operations of `DeviceOps` that only steps with drafts call."""

    def subtract_rejected(
        self,
        rejected: torch.Tensor,
        rows: torch.Tensor,
        owners: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        accepted: torch.Tensor | None,
        groups: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    ) -> None:
        """Subtract, then look the slots up in the block tables."""
        fallen = rejected[rows]
        seq_lens.sub_(fallen[:-1])
        positions.sub_(fallen[owners])
        if accepted is not None:
            accepted.sub_(fallen[:-1])
        request = owners.clamp(max=len(rows) - 2)
        for table, slots, size in groups:
            blocks = table[request, positions // size].to(torch.int64)
            slots.copy_(torch.where(slots < 0, slots, blocks * size + positions % size))

    def verify_drafts(
        self,
        sampled: torch.Tensor,
        drafts: torch.Tensor | None,
        expected: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        input_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        table: torch.Tensor,
        rejected: torch.Tensor,
        max_drafts: int,
    ) -> Verified:
        """Count the places in front of a row's first difference."""
        first, verified, known, stand_ins, *_ = expected.unbind()
        accepted, last = torch.zeros_like(first), first
        if drafts is not None:
            differs = (sampled != drafts).long()
            before = differs.cumsum(0) - differs
            same = before == before[first][places]
            accepted = accepted.index_add(0, places, same.long()) - 1
            last = first + accepted
        previous = table[input_ids[logits_indices[last]]]  # before the placeholders mean other tokens
        newest, fallen = sampled[last].clamp(min=0), verified - accepted
        table.scatter_(0, stand_ins, newest)
        rejected[rows] = fallen
        return Verified(last, newest, known + accepted, fallen, previous)

    def fill_drafts(
        self,
        found: torch.Tensor,
        newest: torch.Tensor,
        stand_ins: torch.Tensor,
        table: torch.Tensor,
        max_drafts: int,
        vocab_size: int,
    ) -> torch.Tensor:
        """Replace what is no token."""
        filled = newest[:, None].expand(-1, max_drafts).clone()
        valid = (found >= 0) & (found < vocab_size)
        columns = found.shape[1]
        filled[:, :columns] = torch.where(valid, found, filled[:, :columns])
        table[stand_ins[:, None] + torch.arange(1, 1 + max_drafts, device=stand_ins.device)] = filled
        return torch.cat([found, filled], 1)

    def draft_places(
        self,
        found: DraftPlaces,
        slots: torch.Tensor,
        lead_slots: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Look the slots up in the block tables."""
        steps = torch.arange(len(slots), device=positions.device)[:, None]
        live, places = positions >= 0, positions + steps  # [num_tokens, n]
        where = places.clamp(min=0, max=max_model_len - 1)
        found.seq_lens.copy_((where + 1) * live)
        found.positions.copy_(where)
        slots.copy_(_slots(table, block_size, places, where, live))
        if lead_slots.numel():
            leading = torch.stack([positions - 1, positions])  # [2, n]
            led = leading.clamp(min=0, max=max_model_len - 1)
            lead_slots.copy_(_slots(table, block_size, leading, led, live).T.flatten())
            found.lead_positions.copy_(led.T.flatten())


def _slots(
    table: torch.Tensor, size: int, places: torch.Tensor, where: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Return slots [m, n] of `places` [m, n], of which `where` are those inside the longest sequence."""
    blocks = table.gather(1, (where // size).T).T
    found = blocks.long() * size + where % size
    return found.masked_fill((blocks == _NULL_BLOCK) | (places != where) | ~live, -1)
