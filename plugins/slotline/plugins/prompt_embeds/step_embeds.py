"""Rows of prompts' embeddings that a step reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.multimodal.embeds import Embeds

Int = npt.NDArray[np.int64]
Prompts = Sequence[tuple[int, torch.Tensor]]
"""Requests of a step, each with its place in the batch and the embeddings [n, hidden_size] of its whole prompt."""


@frozen(eq=False)
class StepPromptEmbeds:
    """Embeddings of a step, in `ModelInputs.extras`.

    Attributes:
        embeds: of its own tokens. None on a rank that embeds nothing.
        following: returns those of the tokens that follow its tokens, for drafters that look one token ahead. None if
            they take none.
    """

    embeds: Embeds | None
    following: Callable[[], Embeds | None]


def embeds_of(inputs: ModelInputs, prompts: Prompts, device: str, shift: int = 0) -> Embeds | None:
    """Return the embeddings that the tokens `shift` places after a step's tokens take. None if they take none."""
    counts = inputs.num_scheduled
    computed = inputs.seq_lens_cpu[: len(counts)] - counts
    offsets = np.cumsum(counts) - counts
    index, values = list[Int](), list[torch.Tensor]()
    for place, embeds in prompts:
        first = int(computed[place]) + shift
        end = min(first + int(counts[place]), len(embeds))
        if first < end:
            index.append(offsets[place] + np.arange(end - first))
            values.append(embeds[first:end])
    if not index:
        return None
    joined = values[0] if len(values) == 1 else torch.cat(values)
    places = torch.from_numpy(np.concatenate(index))
    return Embeds(places.to(device, non_blocking=True), joined.to(device, non_blocking=True))
