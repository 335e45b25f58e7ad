"""Pruning of a video's tokens that hardly change from frame to frame.

The method is EVS (Bagrov et al., "Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM
Inference", arXiv 2510.14624). It looks at pixels, so tokens, positions and sizes are known before the video is encoded.
The encoder sees the whole video. Kept tokens stay where they were: their positions, and those of the text
behind the video, are the same as without pruning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

KEPT = "kept_video_tokens"
"""Of a video's inputs: [rows over time, tokens of a row] bool."""


def kept_tokens(patches: torch.Tensor, rows: int, group: int, rate: float) -> torch.Tensor:
    """Return which tokens of a video are kept, [rows, n] bool.

    All of the first row are kept. Of the others, the share `rate` is pruned, rounded down: those whose pixels have
    changed least since the row before, by the sum of absolute differences. Of equally changed ones, earlier ones stay.

    Args:
        patches: [rows * n * group, width], the pixels, as the encoder reads them.
        rows: of the grid over time.
        group: patches of a token.
        rate: from 0 to below 1.
    """
    pixels = patches.float().reshape(rows, -1, group * patches.shape[1])  # [rows, n, numbers of a token]
    change = pixels.diff(dim=0).abs().sum(-1).flatten()  # [(rows - 1) * n]
    order = change.argsort(descending=True, stable=True)
    kept = torch.ones(pixels.shape[:2], dtype=torch.bool)
    kept[1:].view(-1)[order[len(order) - int(rate * len(order)) :]] = False
    return kept


def unpruned(
    token_ids: Sequence[int], placeholder: int, videos: Iterable[torch.Tensor], start: int | None
) -> tuple[list[int], list[int]]:
    """Return a prompt as if no video was pruned, and the place of each of its tokens there.

    Args:
        token_ids: the pruned prompt.
        placeholder: the token of a video.
        videos: [rows, n] bool, the kept tokens of each video in the prompt's order.
        start: the token in front of each row. None if the rows of a video follow each other.
    """
    tokens, places, at = list[int](), list[int](), 0
    for kept in videos:
        for number, row in enumerate(kept):
            begin = token_ids.index(placeholder, at) if number == 0 else at  # the first row has all of its tokens
            if number and start is not None:
                begin = token_ids.index(start, at) + 1
            places += range(len(tokens), len(tokens) + begin - at)
            tokens += token_ids[at:begin]
            places += (len(tokens) + row.nonzero().flatten()).tolist()
            tokens += [placeholder] * len(row)
            at = begin + int(row.sum())
    places += range(len(tokens), len(tokens) + len(token_ids) - at)
    return [*tokens, *token_ids[at:]], places
