"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): the logits of a prompt, moved away from those that
a negative prompt gives with the same output behind it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.scheduling.rows import Rows

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class GuidedPlaces:
    """Where the pairs of a step lie among its logits.

    Attributes:
        leaders, companions: [k] int64 on the device.
        scales: [k, 1] float32 on the device.
    """

    leaders: torch.Tensor
    companions: torch.Tensor
    scales: torch.Tensor

    def combine(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] float32 with the leaders' guided; the input is not changed."""
        own = logits[self.leaders].log_softmax(dim=-1)
        other = logits[self.companions].log_softmax(dim=-1)
        guided = other + self.scales * (own - other)
        possible = own.isfinite() & other.isfinite()  # no scale makes a number of two infinities
        return logits.index_copy(0, self.leaders, torch.where(possible, guided, own))

    def follow(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [n] int64 with each leader's for its companion."""
        return tokens.index_copy(0, self.companions, tokens[self.leaders])


def guided_places(rows: Rows, which: Int, device: torch.device) -> GuidedPlaces | None:
    """The pairs among the permanent rows `which` [n] of a step's logits; None without any.

    A row whose request has just ended, while its step was in flight, has no partner any more.
    """
    leads = (rows.partner[which] >= 0) & (rows.guidance_scale[which] != 1)
    if not leads.any():
        return None
    place = np.full(rows.max_requests, -1, np.int64)
    place[which] = np.arange(len(which))
    leaders = np.flatnonzero(leads)
    companions = place[rows.partner[which[leaders]]]
    scales = rows.guidance_scale[which[leaders], None]
    index = torch.from_numpy(np.stack([leaders, companions])).to(device, non_blocking=True)
    return GuidedPlaces(index[0], index[1], torch.from_numpy(scales).to(device, non_blocking=True))
