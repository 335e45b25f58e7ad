"""Ban of tokens by a bitmask: one bit for each token of the vocabulary, 1 if it may come next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.triton_support import has_triton

Int32 = npt.NDArray[np.int32]
_BITS = 32  # of a word
_AT_A_TIME = 2**16
"""Logits."""
_MINUS_INFINITY = np.float32(-np.inf).view(np.int32)
_KEPT_BITS: Int32 = -((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.int32)
"""[256, 8] for each byte of a mask: all bits of a number whose token is allowed, no bit of the others."""


class TokenBitmask:
    """Bitmasks of some rows of logits, on the host, to be applied on the logits' device.

    For a CUDA device they are written into pinned memory, which is copied asynchronously in one piece. Torch's
    allocator does not hand out the memory again before the copy is over.

    Attributes:
        words: [num_rows, ceil(vocab_size / 32)] int32, all ones until written to.
        places: [num_rows] int32, the row of the logits that each belongs to.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        width = -(-vocab_size // _BITS)
        size = num_rows * (width + 1)  # the words, then the places
        self._flat = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
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
        if logits.device.type == "cpu":
            return self._apply_on_host(logits, in_place=in_place)
        words, places = self._on_device(logits.device)
        if logits.device.type == "cuda" and has_triton():
            from slotline.core.sampling.triton_logits_ops import ban_by_bitmask

            result = (
                logits if in_place and logits.is_contiguous() else logits.clone(memory_format=torch.contiguous_format)
            )
            ban_by_bitmask(result, words, places)
            return result
        result = logits.clone()
        result[places] = logits[places].masked_fill_(unpacked(words, logits.shape[1]), -torch.inf)
        return result

    def _apply_on_host(self, logits: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """Apply the bitmask on a CPU by arithmetic on the numbers' bits.

        A branch for each number cannot be predicted by the processor and takes ten times as long. A few rows are done
        at a time, so that temporary arrays stay in a core's cache.
        """
        own = in_place and logits.is_contiguous()
        result = logits if own else logits.clone(memory_format=torch.contiguous_format)
        bits, eights, vocab_size = result.numpy().view(np.int32), self.words.view(np.uint8), logits.shape[1]
        rows = max(1, _AT_A_TIME // vocab_size)
        for start in range(0, len(self.places), rows):
            block = eights[start : start + rows]
            kept = np.take(_KEPT_BITS, block, axis=0).reshape(len(block), -1)[:, :vocab_size]
            places = (
                slice(start, start + rows) if len(self.places) == len(logits) else self.places[start : start + rows]
            )
            chosen = bits[places]
            chosen ^= _MINUS_INFINITY
            chosen &= kept
            chosen ^= _MINUS_INFINITY
            bits[places] = chosen
        return result

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the words and the places in one copy."""
        flat = self._flat.to(device, non_blocking=True)
        num_rows, width = self.words.shape
        return flat[: num_rows * width].view(num_rows, width), flat[num_rows * width :]


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpack the banned tokens of bitmasks [num_rows, ceil(vocab_size / 32)] int32: [num_rows, vocab_size] bool."""
    eights = words.view(torch.uint8).view(len(words), -1, 1)
    bit = torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=words.device))
    return ((eights & bit) == 0).view(len(words), -1)[:, :vocab_size]
