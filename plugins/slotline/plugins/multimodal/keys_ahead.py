"""Steps of models in which tokens of an image see all of that image.

A *run* is an item's tokens without other tokens between them. A step computes either all that is left of a run or none
of it, so each token's later keys are new in the same step. What is left of a run may begin in its middle, behind cached
blocks: their keys are those of the same image, since hashes of blocks cover it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import evolve

from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.multimodal.features import Feature, Int
from slotline.registry.errors import IntegrityError


def runs(feature: Feature) -> Iterator[tuple[int, int]]:
    """Yield the first position of each run of an item, and the position after its last."""
    cuts = np.flatnonzero(np.diff(feature.positions) > 1)
    starts = feature.positions[np.concatenate(([0], cuts + 1))]
    ends = feature.positions[np.concatenate((cuts, [-1]))] + 1
    yield from zip(starts.tolist(), ends.tolist(), strict=True)


def longest_run(features: Sequence[Feature]) -> int:
    """Return the number of tokens of the longest run, 0 for none."""
    return max((end - start for feature in features for start, end in runs(feature)), default=0)


def without_part(features: Sequence[Feature], computed: int, count: int) -> int:
    """Return how many of the `count` tokens after the computed ones end outside of a run. 0 if none do."""
    last = computed + count
    for feature in features:
        if feature.start < last < feature.end:
            cut = (start for start, end in runs(feature) if start < last < end)
            return max(0, next(cut, last) - computed)
    return count


def with_keys_ahead(inputs: ModelInputs, features: Sequence[tuple[int, Feature]]) -> ModelInputs:
    """Return a step's inputs whose attention batches say how far tokens of images see ahead.

    Args:
        features: the step's items, each with its row.

    Raises:
        IntegrityError: if the step ends within a run.
    """
    ends = inputs.seq_lens_cpu[: len(inputs.num_scheduled)]
    offsets = inputs.query_start_loc_cpu[1 : len(ends) + 1] - ends  # from a position to its place in the step
    place = {row: i for i, row in enumerate(inputs.rows.tolist())}
    ahead = np.zeros(inputs.num_padded_tokens, np.int32)
    for row, feature in features:
        i = place.get(row)
        if i is None:
            continue
        computed, last = int(ends[i] - inputs.num_scheduled[i]), int(ends[i])
        for start, end in runs(feature):
            if start < last < end:
                raise IntegrityError(f"a step ends at position {last}, within the item's tokens {start} to {end - 1}")
            here: Int = np.arange(max(start, computed), min(end, last))
            ahead[here + offsets[i]] = end - 1 - here
    batches = (
        evolve(
            batch,
            keys_ahead=torch.from_numpy(ahead).to(batch.positions.device),
            keys_ahead_cpu=ahead,
            common_prefix_len=0,
            common_prefix=None,
            prefix_groups=None,
        )
        for batch in inputs.batches
    )
    return evolve(inputs, batches=tuple(batches), wanted=None)
