"""Ban of tokens by a bitmask: one bit for each token of the vocabulary, 1 if it may come next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts.device import Device

Int32 = npt.NDArray[np.int32]
_BITS = 32  # of a word


class TokenBitmask:
    """Bitmasks of some rows of logits, on the host, to be applied on the logits' device.

    They are written into memory of the host that the device copies asynchronously, in one piece. The memory is not
    handed out again before the copy is over.

    Attributes:
        words: [num_rows, ceil(vocab_size / 32)] int32, all ones until written to.
        places: [num_rows] int32, the row of the logits that each belongs to.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device) -> None:
        width = -(-vocab_size // _BITS)
        self._ops = device.ops
        self._flat = device.host_empty(num_rows * (width + 1), torch.int32)  # the words, then the places
        array: Int32 = self._flat.numpy()
        array.view(np.uint8).fill(0xFF)  # half the time that it takes by words
        self.words = array[: num_rows * width].reshape(num_rows, width)
        self.places = array[num_rows * width :]

    def ban(self, rows: npt.NDArray[np.bool_], token_ids: tuple[int, ...]) -> None:
        """Mark tokens as banned in some rows of the bitmask."""
        for token in token_ids:
            self.words.view(np.uint32)[rows, token // _BITS] &= np.uint32(~(1 << token % _BITS) & 0xFFFFFFFF)

    def apply(self, logits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the logits [n, vocab_size] with minus infinity for every banned token.

        The input is changed only if `in_place` is set. This saves a read and a write of all logits on a GPU.
        """
        words, places = self._on_device(logits.device)
        return self._ops.apply_bitmask(logits, words, places, in_place=in_place)

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the words and the places in one copy."""
        flat = self._flat.to(device, non_blocking=True)
        num_rows, width = self.words.shape
        return flat[: num_rows * width].view(num_rows, width), flat[num_rows * width :]
