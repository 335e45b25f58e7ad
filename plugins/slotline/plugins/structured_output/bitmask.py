"""Ban of tokens by a bitmask: one bit for each token of the vocabulary, 1 if it may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts.device import Device

Int32 = npt.NDArray[np.int32]
_BITS = 32  # of a word


class TokenBitmask:
    """Bitmasks of some rows of logits, on the host, to be applied on the logits' device.

    They are written into memory of the host that the device copies asynchronously, in one piece. The memory is not
    handed out again before the copy is over. Rows may share a mask, which is copied once.

    Args:
        num_masks: of the rows together. None for one of each.

    Attributes:
        words: [num_masks, ceil(vocab_size / 32)] int32, without values until written to.
        places: [num_rows] int32, the row of the logits that each belongs to.
        mask_of: [num_rows] int32, the mask of each, at first its own.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, *, num_masks: int | None = None) -> None:
        width = num_words(vocab_size)
        self._ops = device.ops
        self._shared = num_masks is not None
        num_masks = num_rows if num_masks is None else num_masks
        self._flat = device.host_empty(num_masks * width + 2 * num_rows, torch.int32)  # words, places, masks
        array: Int32 = self._flat.numpy()
        end = num_masks * width
        self.words = array[:end].reshape(num_masks, width)
        self.places = array[end : end + num_rows]
        self.mask_of = array[end + num_rows :]
        self.mask_of[:] = np.arange(num_rows)

    def allow_all(self, count: int) -> None:
        """Set all bits of the first `count` masks."""
        self.words[:count].view(np.uint8).fill(0xFF)  # half the time that it takes by words

    def ban(self, rows: npt.NDArray[np.bool_], token_ids: tuple[int, ...]) -> None:
        """Mark tokens as banned in the masks of some rows."""
        ban(self.words, np.unique(self.mask_of[rows]), token_ids)

    def apply(self, logits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the logits [n, vocab_size] with minus infinity for every banned token.

        The input is changed only if `in_place` is set. This saves a read and a write of all logits on a GPU.
        """
        words, places = self._on_device(logits.device)
        return self._ops.apply_bitmask(logits, words, places, in_place=in_place)

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Send everything in one copy. Return the words of each row and the places."""
        flat = self._flat.to(device, non_blocking=True)
        num_masks, width = self.words.shape
        num_rows = len(self.places)
        words, places, mask_of = flat.split([num_masks * width, num_rows, num_rows])
        words = words.view(num_masks, width)
        return words.index_select(0, mask_of) if self._shared else words, places


def num_words(vocab_size: int) -> int:
    """Return the words of a mask."""
    return -(-vocab_size // _BITS)


def ban(words: Int32, masks: npt.NDArray[Any], token_ids: Sequence[int]) -> None:
    """Mark tokens as banned in some `masks` of [num_masks, words]."""
    for token in token_ids:
        words.view(np.uint32)[masks, token // _BITS] &= np.uint32(~(1 << token % _BITS) & 0xFFFFFFFF)
