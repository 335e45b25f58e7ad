"""Places of a step's guided requests among its logits, and of the companions that share their tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen

from slotline.core.batch.request_table import RequestTable

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class Pairs:
    """The pairs of a step.

    Attributes:
        companions: [n] int64, for each row of the logits the place of its companion, or -1 without a companion.
    """

    companions: Int
    _leaders: torch.Tensor = field(repr=False)  # [k] int64 on the device, as are their companions' places
    _followers: torch.Tensor = field(repr=False)

    def follow(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens [n] int64 with each leader's token for its companion."""
        return tokens.index_copy(0, self._followers, tokens[self._leaders])


def pairs_of(rows: RequestTable, which: Int, device: torch.device) -> Pairs | None:
    """Return the pairs among the permanent rows `which` [n] of a step's logits, or None without any.

    A row whose request has just ended, while its step was in flight, no longer has a partner.
    """
    if not rows.paired:
        return None
    leads = (rows.partner[which] >= 0) & ~rows.follows[which]
    if not leads.any():
        return None
    place = np.full(rows.max_requests, -1, np.int64)
    place[which] = np.arange(len(which))
    companions = np.where(leads, place[rows.partner[which]], -1)
    leaders = np.flatnonzero(leads)
    index = torch.from_numpy(np.stack([leaders, companions[leaders]])).to(device, non_blocking=True)
    return Pairs(companions, index[0], index[1])
