"""Banning tokens by a bitmask: one bit for each token of the vocabulary, 1 where it may come next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

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
            places, banned = torch.from_numpy(self.places), torch.from_numpy(bits == 0)
        else:
            places, banned = self._on_device(logits.device, logits.shape[1])
        if len(places) == len(logits):
            return logits.masked_fill(banned, -torch.inf)
        result = logits.clone()
        result[places] = logits[places].masked_fill_(banned, -torch.inf)
        return result

    def _on_device(self, device: torch.device, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The places [num_rows] and what is banned there [num_rows, vocab_size] bool."""
        flat = self._flat.to(device, non_blocking=True)
        num_rows, width = self.words.shape
        eights = flat[: num_rows * width].view(torch.uint8).view(num_rows, -1, 1)
        bit = torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=device))
        return flat[num_rows * width :], ((eights & bit) == 0).view(num_rows, -1)[:, :vocab_size]
