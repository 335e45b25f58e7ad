"""Places of a step's pairs among its logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.plugins.guidance.pairs import LivePairs

Int = npt.NDArray[np.int64]


class CompanionFields:
    """Field `companion_logits` of the batches of processors that declare `companions`."""

    def __init__(self, pairs: LivePairs) -> None:
        self._pairs = pairs

    def has(self, rows: Int, which: Int) -> npt.NDArray[np.bool_]:
        """Return which of the places `which` [m] among a step's `rows` [n] have a companion in the step."""
        return self._pairs.places(rows)[which] >= 0

    def of(self, raw: torch.Tensor, rows: Int, which: Int) -> dict[str, torch.Tensor]:
        """Return the companions' logits [m, vocab_size] of the places `which` [m], out of `raw` [n, vocab_size]."""
        places = torch.from_numpy(self._pairs.places(rows)[which])
        return {"companion_logits": raw[places.to(raw.device, non_blocking=True)]}


def follow(pairs: LivePairs, rows: Int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens [n] int64 of a step's `rows` with each leader's token for its companion."""
    companions = pairs.places(rows)
    leaders = np.flatnonzero(companions >= 0)
    if not len(leaders):
        return tokens
    index = torch.from_numpy(np.stack([leaders, companions[leaders]])).to(tokens.device, non_blocking=True)
    return tokens.index_copy(0, index[1], tokens[index[0]])
