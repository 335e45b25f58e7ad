"""Log-probabilities of sampled tokens and of prompts, in the four modes of `sampling.logprobs_mode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.api.outputs import Logprob, TokenLogprobs
from slotline.core.device.transfer_buffer import Download

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class ScoredPlaces:
    """The logits rows of a step whose requests want log-probabilities.

    Attributes:
        places: [m] int64, with `index` the same on the device.
        tops: [m] int64, how many of the most likely tokens each wants.
    """

    places: Int
    index: torch.Tensor
    tops: Int

    @classmethod
    def of(cls, num_logprobs: Int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> ScoredPlaces:
        """Build the places from the number that each logits row wants, [n], -1 for none."""
        places = np.flatnonzero(num_logprobs >= 0)
        return cls(places=places, index=upload(places), tops=num_logprobs[places])


@frozen(kw_only=True, eq=False)
class PendingLogprobs:
    """A step's log-probabilities on their way to the host."""

    scored: ScoredPlaces
    packed: Download

    def by_row(self, places: Int, rows: Int) -> dict[int, list[TokenLogprobs]]:
        """Wait, and return the entries of the tokens [n] at `places`, by the rows [n] that got them."""
        entries = unpack_logprobs(self.packed.wait(), self.scored.tops.tolist())
        entry_of = dict(zip(self.scored.places.tolist(), entries, strict=True))
        found: dict[int, list[TokenLogprobs]] = {}
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            if place in entry_of:
                found.setdefault(row, []).append(entry_of[place])
        return found


@frozen(kw_only=True, eq=False)
class PendingPrompts:
    """Log-probabilities of prompts on their way to the host, by row the shape of each one's part."""

    shapes: dict[int, torch.Size]
    packed: Download

    def by_row(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Wait, and return the entries of each prompt from its second token on, with that one's place."""
        found, rest = dict[int, tuple[int, list[TokenLogprobs]]](), self.packed.wait()
        for row, (count, width) in self.shapes.items():
            part, rest = rest[: count * width].reshape(count, width), rest[count * width :]
            found[row] = (1, unpack_logprobs(part, [width // 2 - 1] * count))
        return found


def pack_logprobs(scores: torch.Tensor, chosen: torch.Tensor, top: int, *, normalise: bool) -> torch.Tensor:
    """Pack the values of the chosen tokens and the top ones, without waiting for the device.

    Args:
        scores: [n, vocab_size] float32 logits.
        chosen: [n] int64.
        top: how many of the most likely tokens.
        normalise: log-softmax first (`*_logprobs`), or the logits themselves (`*_logits`).

    Returns:
        [n, 2 k + 3] int32 on the device, downloaded in one copy: the chosen token and the top k (k is `top`, or the
        vocabulary's size if that is less), their values' float32 bits, and the chosen token's rank, from 1.
    """
    values = scores.log_softmax(dim=-1) if normalise else scores
    picked = values.gather(-1, chosen[:, None])
    best, ids = values.topk(min(top, values.shape[-1]), dim=-1)
    ranks = (values > picked).sum(dim=-1, keepdim=True) + 1
    numbers = torch.cat([picked, best], dim=-1).view(torch.int32)
    return torch.cat([chosen[:, None].int(), ids.int(), numbers, ranks.int()], dim=-1)


def unpack_logprobs(packed: npt.NDArray[np.int32], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return each position's chosen token, then its `tops` [n] most likely ones, of what `pack_logprobs` gave."""
    width, entries = packed.shape[1] // 2, list[TokenLogprobs]()
    columns = (packed[:, :width], packed[:, width:-1].view(np.float32), packed[:, -1])
    for ids, values, rank, top in zip(*(column.tolist() for column in columns), tops, strict=True):
        entry = {token: Logprob(values[i], i) for i, token in enumerate(ids[1 : top + 1], 1)}
        entries.append({ids[0]: Logprob(values[0], rank), **entry})
    return entries
