"""Log-probabilities of sampled tokens and of prompts, in the four modes of `sampling.logprobs_mode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, frozen

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

    def wait(self) -> dict[int, TokenLogprobs]:
        """Wait for the log-probabilities and return the entries by logits row."""
        table = LogprobTable.unpack(self.packed.wait())
        tops = self.scored.tops.tolist()
        return {place: table.entry(i, tops[i]) for i, place in enumerate(self.scored.places.tolist())}


@define(kw_only=True, eq=False)
class LogprobTable:
    """Top values and the chosen token's, for n positions, on the host.

    Attributes:
        token_ids: [n, k + 1], the chosen token first, then the top k.
        values: [n, k + 1].
        ranks: [n], rank of the chosen token, from 1.
    """

    token_ids: list[list[int]]
    values: list[list[float]]
    ranks: list[int]

    @classmethod
    def unpack(cls, packed: npt.NDArray[np.int32]) -> LogprobTable:
        """Unpack the downloaded table that `pack_logprobs` computed."""
        width = packed.shape[1] // 2
        return cls(
            token_ids=packed[:, :width].tolist(),
            values=packed[:, width:-1].view(np.float32).tolist(),
            ranks=packed[:, -1].tolist(),
        )

    def entry(self, index: int, top: int) -> TokenLogprobs:
        """Return the chosen token and the `top` most likely ones at one position."""
        ids, values = self.token_ids[index], self.values[index]
        entry = {
            token: Logprob(value, rank)
            for rank, (token, value) in enumerate(zip(ids[1 : top + 1], values[1:], strict=False), 1)
        }
        return {ids[0]: Logprob(values[0], self.ranks[index]), **entry}


def pack_logprobs(scores: torch.Tensor, chosen: torch.Tensor, top: int, *, normalise: bool) -> torch.Tensor:
    """Pack the values of the chosen tokens and the top ones, without waiting for the device.

    Args:
        scores: [n, vocab_size] float32 logits.
        chosen: [n] int64.
        top: how many of the most likely tokens.
        normalise: log-softmax first (`*_logprobs`), or the logits themselves (`*_logits`).

    Returns:
        [n, 2 k + 3] int32 on the device, for `LogprobTable.unpack`: the chosen token and the top k (k is `top`, or the
        vocabulary's size if that is less), their values' float32 bits, and the chosen token's rank.
        It is downloaded in one copy.
    """
    values = scores.log_softmax(dim=-1) if normalise else scores
    picked = values.gather(-1, chosen[:, None])
    best, ids = values.topk(min(top, values.shape[-1]), dim=-1)
    ranks = (values > picked).sum(dim=-1, keepdim=True) + 1
    numbers = torch.cat([picked, best], dim=-1).view(torch.int32)
    return torch.cat([chosen[:, None].int(), ids.int(), numbers, ranks.int()], dim=-1)


def with_text(entries: Sequence[TokenLogprobs | None], decode: dict[int, str]) -> list[TokenLogprobs | None]:
    """Return the entries with each token's text filled in from `decode`."""
    return [
        None
        if entry is None
        else {token: value._replace(decoded_token=decode.get(token)) for token, value in entry.items()}
        for entry in entries
    ]
