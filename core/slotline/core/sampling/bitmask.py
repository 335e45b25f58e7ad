"""Banning tokens by a bitmask: one bit for each token of the vocabulary, 1 where it may come next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.sampling.batch import has_triton

Int32 = npt.NDArray[np.int32]
_BITS = 32  # of a word


class TokenBitmask:
    """Bitmasks of some rows of logits, on the host, to be applied on the logits' device.

    For a CUDA device they are written into pinned memory, which travels there in one copy that nothing waits for;
    torch's allocator gives the memory to no one else before the copy is over.

    Attributes:
        words: [num_rows, ceil(vocab_size / 32)] int32, all ones until written to.
        places: [num_rows] int32, the row of the logits that each belongs to.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        width = -(-vocab_size // _BITS)
        self._flat = torch.full(
            (num_rows * (width + 1),), -1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )  # the words, then the places
        array: Int32 = self._flat.numpy()
        self.words = array[: num_rows * width].reshape(num_rows, width)
        self.places = array[num_rows * width :]

    def ban(self, rows: npt.NDArray[np.bool_], token_ids: tuple[int, ...]) -> None:
        """Ban tokens in some rows of the bitmask."""
        for token in token_ids:
            self.words.view(np.uint32)[rows, token // _BITS] &= np.uint32(~(1 << token % _BITS) & 0xFFFFFFFF)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [n, vocab_size] with minus infinity for every token that is banned; the input is not changed."""
        if logits.device.type == "cpu":
            bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
            return _masked(logits, torch.from_numpy(self.places), torch.from_numpy(bits == 0))
        words, places = self._on_device(logits.device)
        if logits.device.type == "cuda" and has_triton():
            from slotline.core.sampling.triton_rows import ban_by_bitmask

            return ban_by_bitmask(logits, words, places)
        return _masked(logits, places, unpacked(words, logits.shape[1]))

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The words and the places, sent in one copy."""
        flat = self._flat.to(device, non_blocking=True)
        num_rows, width = self.words.shape
        return flat[: num_rows * width].view(num_rows, width), flat[num_rows * width :]


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What bitmasks [num_rows, ceil(vocab_size / 32)] int32 ban, [num_rows, vocab_size] bool, in torch."""
    eights = words.view(torch.uint8).view(len(words), -1, 1)
    bit = torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=words.device))
    return ((eights & bit) == 0).view(len(words), -1)[:, :vocab_size]


def _masked(logits: torch.Tensor, places: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    if len(places) == len(logits):
        return logits.masked_fill(banned, -torch.inf)
    result = logits.clone()
    result[places] = logits[places].masked_fill_(banned, -torch.inf)
    return result
