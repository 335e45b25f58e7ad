"""Images that are cut into a grid of patches of their own size, with positions on three axes (the Qwen-VL family)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.plugins.model_families.image_processing import ImageProcessing
from slotline.registry.contracts.model_family import Modality
from slotline.registry.errors import RequestError

AXES = 3
"""Time, row and column."""
GRID = "image_grid_thw"


class GridProcessing(ImageProcessing):
    """A checkpoint's image processor, run on one image at a time.

    An image has a placeholder token for each group of merged patches. The image processor alone is read, since the
    whole processor also wants a processor of videos, which needs torchvision.

    Args:
        path: the checkpoint's folder.
        modality: images.
        merge_size: patches along each side of a group.

    Raises:
        ModelError: if the folder has no image processor that can be loaded.
    """

    def __init__(self, path: Path, modality: Modality, merge_size: int) -> None:
        super().__init__(path, modality)
        self._merged = merge_size**2

    def _read(self, path: Path) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)

    def _processed(self, image: Any) -> tuple[list[int], Any]:
        found = self._processor(images=[image], return_tensors="pt")
        return [self._modality.placeholder_token_id] * (int(found[GRID].prod()) // self._merged), found


def grid_positions(
    encoder: Any, image_token: int, token_ids: Sequence[int], items: Sequence[tuple[str, Mapping[str, torch.Tensor]]]
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions of a prompt's tokens, see `MultimodalModel.axis_positions`.

    Args:
        encoder: the transformers model, which has the rule.
        image_token: the placeholder token of images.

    Raises:
        RequestError: if no token is between two images, since the rule takes them for one.
    """
    tokens = torch.tensor([token_ids], dtype=torch.int64)  # [1, n]
    shows = (tokens == image_token).int()
    runs = int(shows[0, 0]) + int((shows.diff() > 0).sum())
    if runs != len(items):
        raise RequestError(
            f"{len(items)} images are in {runs} places of the prompt, and this model needs a token between two images",
            fix="put <|vision_start|> and <|vision_end|> around each image, as the chat template does",
        )
    grids = torch.cat([inputs[GRID] for _, inputs in items])  # [images, 3]
    positions, delta = encoder.get_rope_index(tokens, mm_token_type_ids=shows, image_grid_thw=grids)
    return positions[:, 0].numpy().astype(np.int64), int(delta)
