"""Images that are cut into tiles by a list of resolutions (LLaVA-NeXT and LLaVA-OneVision)."""

from __future__ import annotations

from typing import Any

STEPS = 32
"""Sizes that are tried for each side of a tile. Tiles have fewer patches along a side."""


def largest(processor: Any) -> tuple[int, int] | None:
    """Return the height and width of an image with the most tokens, None if the processor has no list of resolutions.

    Only a part of a resolution is shown where an image has other proportions. Such a part may have more tokens than the
    whole, as models shrink what is above their limit. So parts are tried too, up to a tile smaller than the resolution.
    """
    images = getattr(processor, "image_processor", processor)
    resolutions = getattr(images, "image_grid_pinpoints", None)
    if not resolutions:
        return None
    tile = min(min(resolution) for resolution in resolutions)
    less = range(0, tile, max(1, tile // STEPS))
    sizes = {(height - step, width) for height, width in resolutions for step in less}
    sizes |= {(height, width - step) for height, width in resolutions for step in less}
    tried = sorted(sizes)
    counts: list[int] = processor._get_num_multimodal_tokens(image_sizes=tried)["num_image_tokens"]
    return tried[counts.index(max(counts))]
