"""Kept masks on a device, so that most steps only send which of them their rows have, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.plugins.structured_output.bitmask import num_words
from slotline.plugins.structured_output.mask_cache import KeptMask
from slotline.registry.contracts.device import Device

Int = npt.NDArray[np.int64]
_MOST_MASKS = 256  # 5 MB for a vocabulary of 152,000


class MaskTable:
    """The masks that the last steps had, on a device. Beyond `most`, the table begins anew."""

    def __init__(self, vocab_size: int, device: Device, *, most: int = _MOST_MASKS) -> None:
        self.device = device
        self.most = most
        self._width = num_words(vocab_size)
        self._table: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._place_of: dict[KeptMask, int] = {}
        self._last: tuple[list[KeptMask], bytes] | None = None
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode()
    def gather(self, masks: list[KeptMask], places: Int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return masks [n, words] int32 and their `places` [n] int32 on the device of the logits.

        There are at most `most` distinct masks. The next call may write to what is returned, on the device and
        behind what was launched until then. A step like the one before gets the same tensors.
        """
        wanted = masks, places.tobytes()
        if self._gathered is None or wanted != self._last:
            if self._table is None:
                self._table = torch.empty(self.most, self._width, dtype=torch.int32, device=device)
            if self._rows is None or len(self._rows) < len(masks):
                self._rows = self._table.new_empty(len(masks), self._width)
            numbers, self._gathered = self._numbers(masks, self._table), None
            flat = self.device.host_empty(2 * len(masks), torch.int32)
            array = flat.numpy()
            array[: len(masks)], array[len(masks) :] = numbers, places
            mask_of, own_places = flat.to(device, non_blocking=True).split(len(masks))
            words = torch.index_select(self._table, 0, mask_of, out=self._rows[: len(masks)])
            self._last, self._gathered = wanted, (words, own_places)
        return self._gathered

    def _numbers(self, masks: Sequence[KeptMask], table: torch.Tensor) -> list[int]:
        """Return the rows of masks in the table, and send those that it does not have."""
        place_of = self._place_of
        new = [mask for mask in dict.fromkeys(masks) if mask not in place_of]
        if len(place_of) + len(new) > self.most:
            place_of.clear()
            new = list(dict.fromkeys(masks))
        if new:
            first = len(place_of)
            sent = self.device.host_empty(len(new) * self._width, torch.int32).view(len(new), self._width)
            np.stack([mask.words for mask in new], out=sent.numpy())
            table[first : first + len(new)].copy_(sent, non_blocking=True)
            place_of.update(zip(new, range(first, first + len(new)), strict=True))
        return [place_of[mask] for mask in masks]


@define(kw_only=True, eq=False)
class StepMasks:
    """Masks of a step that are all kept, and so are in no need of the plugin.

    Attributes:
        masked: [num_logits] bool, the logits that they are for. `logits_rows` [num_logits] are the permanent rows.
        masks: [m] of the masked logits.
        failed: the reasons for rows without a mask, of which there are none.
    """

    masked: npt.NDArray[np.bool_]
    logits_rows: Int
    masks: list[KeptMask]
    table: MaskTable
    failed: Mapping[int, str] = field(factory=dict)

    @classmethod
    def of(cls, rows: Int, masked: npt.NDArray[np.bool_], masks: list[KeptMask], table: MaskTable) -> StepMasks | None:
        """Return the masks of a step. None if the table has no room for them."""
        if len(masks) > table.most and len(set(masks)) > table.most:
            return None
        return cls(masked=masked, logits_rows=rows, masks=masks, table=table)

    def leave_tokens(self) -> bool:
        """Return True if each mask allows a token."""
        return all(mask.leaves for mask in self.masks)

    def apply(self, logits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the logits with minus infinity for every banned token, see `TokenBitmask.apply`."""
        words, places = self.table.gather(self.masks, np.flatnonzero(self.masked), logits.device)
        return self.table.device.ops.apply_bitmask(logits, words, places, in_place=in_place)
