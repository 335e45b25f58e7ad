"""Verification: finds the accepted drafts and the token after them. Drafts never change the generated text.

A step computes the logits after the known tokens and after each draft. Every position gets the same token as without
speculation, drawn with the position's own random number. Drafts are accepted as long as they equal it. A text is
therefore the same with and without drafts, sampled or greedy.

A drafter that gives its distribution is verified by rejection sampling instead (Leviathan et al. 2023, algorithm 1;
Chen
et al. 2023). More drafts are accepted. The text has the target's distribution, but differs from the seed's text without
drafts.

Drafts may form a tree (`draft_tree.py`). The position's random number is the same on each path, so the accepted path is
again the text without drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.core.sampling.sampler import invert
from slotline.proposers.speculation.draft_tree import VerifiedTrees
from slotline.proposers.speculation.rejections import Rejections

Int = npt.NDArray[np.int64]


def standing(
    tokens: Int, drafts: Int, draft_positions: Int, trees: VerifiedTrees | None = None
) -> npt.NDArray[np.bool_]:
    """Return a mask of the logits rows that give a token to their request: all drafts that they assume are accepted.

    Args:
        tokens: [n] the token of each logits row.
        drafts: [n] the draft at the position of each logits row, -1 if there is none. With trees those of the nodes.
        draft_positions: [n] drafts assumed. 0 begins a request.
        trees: the forms, if drafts form trees.
    """
    if trees is not None:
        return trees.accepted(tokens, drafts)
    fell = (tokens != drafts).astype(np.int64)
    before = np.cumsum(fell) - fell
    first = np.maximum.accumulate(np.where(draft_positions == 0, np.arange(len(tokens)), 0))
    stands: npt.NDArray[np.bool_] = before == before[first]
    return stands


def reject(
    logits: torch.Tensor, tokens: torch.Tensor, probabilities: torch.Tensor, rejections: Rejections
) -> torch.Tensor:
    """Replace the tokens of drafted positions by rejection sampling, without waiting for the device.

    Args:
        logits: [n, vocab_size] float32, scaled and masked.
        tokens: [n] int64, as sampled from them.
        probabilities: [entries, k, vocab_size], the distributions that the drafter drew its proposal from. Rows are
            normalized to sum to 1. NaN and negative numbers count as 0.
        rejections: the positions to decide.

    Returns:
        Tokens [n]: the draft if it is accepted, else a token drawn from the target's excess over the drafter.
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


def rehearse_rejection(num_requests: int, num_drafts: int, vocab_size: int, device: str) -> torch.Tensor:
    """Run rejection sampling once on random logits with as many drafts as there can be.

    Its kernels are there then, and its memory is part of the profile.

    Returns:
        the tokens [num_requests * (num_drafts + 1)] int64.

    Raises:
        CapacityError: if the device runs out of memory. It names the setting to lower.
    """
    count, each = num_requests * num_drafts, num_drafts + 1
    request, position = np.divmod(np.arange(count), max(num_drafts, 1))
    what = f"rejection sampling of {count} drafts over {vocab_size} tokens"
    with oom_as_capacity_error(what, "lower scheduler.max_requests, drafter.tokens or cache.memory"):
        logits = torch.randn(num_requests * each, vocab_size, device=device)
        probabilities = torch.rand(num_requests, num_drafts, vocab_size, device=device)
        rejections = Rejections.of(
            places=request * each + position,
            drafts=np.arange(count) % vocab_size,
            entries=request,
            positions=position,
            accept=np.full(count, 0.5),
            draw=np.full(count, 0.5),
            upload=lambda packed: torch.from_numpy(packed).to(device),
        )
        return reject(logits, logits.argmax(-1), probabilities, rejections)
