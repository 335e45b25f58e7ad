"""Log-probabilities of sampled tokens and of prompts, in the four modes of `sampling.logprobs_mode`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define

from slotline.core.outputs import Logprob, TokenLogprobs


@define(kw_only=True, eq=False)
class LogprobTable:
    """Top values and the chosen token's, for n positions; on the host once made.

    Attributes:
        token_ids: [n, k + 1], the chosen token first, then the top k.
        values: [n, k + 1].
        ranks: [n], rank of the chosen token, from 1.
    """

    token_ids: list[list[int]]
    values: list[list[float]]
    ranks: list[int]

    def entry(self, index: int, top: int) -> TokenLogprobs:
        """The chosen token and the `top` most likely ones at one position."""
        ids, values = self.token_ids[index], self.values[index]
        entry = {
            token: Logprob(value, rank)
            for rank, (token, value) in enumerate(zip(ids[1 : top + 1], values[1:], strict=False), 1)
        }
        return {ids[0]: Logprob(values[0], self.ranks[index]), **entry}


def gather_logprobs(scores: torch.Tensor, chosen: torch.Tensor, top: int, *, normalise: bool) -> LogprobTable:
    """Values of the chosen tokens and the top ones.

    Args:
        scores: [n, vocab_size] float32 logits.
        chosen: [n] int64.
        top: how many of the most likely tokens.
        normalise: log-softmax first (`*_logprobs`), or the logits themselves (`*_logits`).
    """
    values = scores.log_softmax(dim=-1) if normalise else scores
    picked = values.gather(-1, chosen[:, None])
    best, ids = values.topk(min(top, values.shape[-1]), dim=-1)
    return LogprobTable(
        token_ids=torch.cat([chosen[:, None], ids], dim=-1).tolist(),
        values=torch.cat([picked, best], dim=-1).tolist(),
        ranks=((values > picked).sum(dim=-1) + 1).tolist(),
    )


def with_text(entries: Sequence[TokenLogprobs | None], decode: dict[int, str]) -> list[TokenLogprobs | None]:
    """The entries with each token's text filled in from `decode`."""
    return [
        None
        if entry is None
        else {token: value._replace(decoded_token=decode.get(token)) for token, value in entry.items()}
        for entry in entries
    ]
