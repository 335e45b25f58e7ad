"""Verification: which drafts stand, and which token follows them. What is drafted never changes what is generated.

A step computes the logits after the known tokens and after each draft. Every position gets the token that it would
have got without speculation, drawn with the position's own random number; drafts stand as long as they equal it. So a
text is the same with and without drafts, sampled or greedy.

A drafter that gives the distribution it drew from is verified by rejection sampling instead (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023): more drafts stand, and the text has the target's distribution, though not the text that
the seed gives without drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.sampler import SamplingBatch, invert, uniforms

Int = npt.NDArray[np.int64]
_ACCEPT = np.uint64(0x9E6C63D0876A9A4F)
"""Sets the numbers that accept apart from those that draw."""


def standing(tokens: Int, drafts: Int, draft_positions: Int) -> npt.NDArray[np.bool_]:
    """Which logits rows give a token to their request: those all of whose assumed drafts stand.

    Args:
        tokens: [n] the token of each logits row.
        drafts: [n] the draft that stands at that place, -1 where there is none.
        draft_positions: [n] drafts assumed; 0 begins a request.
    """
    fell = (tokens != drafts).astype(np.int64)
    before = np.cumsum(fell) - fell
    first = np.maximum.accumulate(np.where(draft_positions == 0, np.arange(len(tokens)), 0))
    stands: npt.NDArray[np.bool_] = before == before[first]
    return stands


def reject(
    logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch, drafts: Int, proposed: torch.Tensor, index: Int
) -> torch.Tensor:
    """Replace the tokens of drafted places by rejection sampling.

    Args:
        logits: [n, vocab_size] float32, scaled and masked.
        tokens: [n] int64, as sampled from them.
        drafts: [n] the draft of each place, -1 where there is none.
        proposed: [m, vocab_size] the drafter's distribution at m of the places, and index [m] which ones.

    Returns:
        Tokens [n]: the draft where it is accepted, else one from what the target has more of than the drafter.
    """
    device = logits.device
    place, draft = torch.from_numpy(index).to(device), torch.from_numpy(drafts[index]).to(device)
    target = logits[place].softmax(-1).double()
    proposed = proposed.double()
    chance = uniforms(batch.seed[index] ^ _ACCEPT, batch.positions[index])
    wanted, offered = (p.gather(1, draft[:, None]).squeeze(1) for p in (target, proposed))
    accept = torch.from_numpy(chance).to(device) * offered < wanted
    rest = (target - proposed).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    other = invert(rest, torch.from_numpy(uniforms(batch.seed[index], batch.positions[index])).to(device))
    chosen = torch.where(accept, draft, other)
    return tokens.index_copy(0, place, chosen)
