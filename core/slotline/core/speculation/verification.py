"""Verification: which drafts stand, and which token follows them. What is drafted never changes what is generated.

A step computes the logits after the known tokens and after each draft. Every position gets the token that it would
have got without speculation, drawn with the position's own random number; drafts stand as long as they equal it. So a
text is the same with and without drafts, sampled or greedy.

A drafter that gives the distribution it drew from is verified by rejection sampling instead (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023): more drafts stand, and the text has the target's distribution, though not the text that
the seed gives without drafts.

Drafts may stand as a tree (`draft_tree.py`): the position's number is the same on each path, so the path that stands is
the text without drafts again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.draft_tree import DraftTree
from slotline.core.batch.rejections import Rejections
from slotline.core.sampling.sampler import invert

Int = npt.NDArray[np.int64]


def standing(
    tokens: Int, drafts: Int, draft_positions: Int, tree: DraftTree | None = None, draft_nodes: Int | None = None
) -> npt.NDArray[np.bool_]:
    """Which logits rows give a token to their request: those all of whose assumed drafts stand.

    Args:
        tokens: [n] the token of each logits row.
        drafts: [n] the draft that stands at that place, -1 where there is none.
        draft_positions: [n] drafts assumed; 0 begins a request.
        tree, draft_nodes: where drafts stand as a tree, its form and the node of each row; then `drafts` are theirs.
    """
    if tree is not None and draft_nodes is not None:
        return tree.accepted(tokens, draft_nodes, drafts)
    fell = (tokens != drafts).astype(np.int64)
    before = np.cumsum(fell) - fell
    first = np.maximum.accumulate(np.where(draft_positions == 0, np.arange(len(tokens)), 0))
    stands: npt.NDArray[np.bool_] = before == before[first]
    return stands


def reject(
    logits: torch.Tensor, tokens: torch.Tensor, probabilities: torch.Tensor, rejections: Rejections
) -> torch.Tensor:
    """Replace the tokens of drafted places by rejection sampling; nothing waits for the device.

    Args:
        logits: [n, vocab_size] float32, scaled and masked.
        tokens: [n] int64, as sampled from them.
        probabilities: [entries, k, vocab_size], what the drafter drew its proposal from. Rows that do not sum to 1 are
            made to; NaN and negative numbers count as 0.
        rejections: the places that this decides.

    Returns:
        Tokens [n]: the draft where it is accepted, else one from what the target has more of than the drafter.
    """
    place, draft, entry, position = rejections.packed[:, :4].unbind(1)
    accept, number = rejections.packed.view(torch.float64)[:, 4:].unbind(1)
    target = logits[place].softmax(-1).double()
    proposed = probabilities[entry, position].double().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)
    proposed = proposed / proposed.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    wanted, offered = (p.gather(1, draft[:, None]).squeeze(1) for p in (target, proposed))
    rest = (target - proposed).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    found = torch.where(accept * offered < wanted, draft, invert(rest, number))
    return tokens.index_copy(0, place, found)
