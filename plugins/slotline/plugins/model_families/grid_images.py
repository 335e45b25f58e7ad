"""Images that are cut into a grid of patches of their own size, with positions on three axes (the Qwen-VL family)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from slotline.plugins.model_families.grid_videos import GRID as VIDEO_GRID
from slotline.plugins.model_families.grid_videos import SECONDS
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


def bare(model: Any) -> Any:
    """Return a transformers model of the same class and configuration without modules, for its rules."""
    found = object.__new__(type(model))
    nn.Module.__init__(found)
    found.config = model.config
    return found


def grid_positions(
    rule: Any,
    placeholders: Mapping[str, int],
    token_ids: Sequence[int],
    items: Sequence[tuple[str, Mapping[str, torch.Tensor]]],
    apart: Collection[str] = (),
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions of a prompt's tokens, see `MultimodalModel.axis_positions`.

    Tokens after the prompt go on behind its last token, as in transformers' `generate`. The `rope_deltas` of
    transformers go on behind the highest position, which differs after a video whose times exceed the positions of the
    text behind it.

    Args:
        rule: the transformers model that has the rule. Its modules are not read.
        apart: modalities with other tokens between the rows of an item over time.
        placeholders: the placeholder token of each modality.

    Raises:
        RequestError: if no token is between two images or two videos, since the rule takes them for one.
    """
    tokens = torch.tensor([token_ids], dtype=torch.int64)  # [1, n]
    types = torch.zeros_like(tokens, dtype=torch.int32)  # as transformers counts them: 1 for images, 2 for videos
    inputs: dict[str, Any] = {}
    for number, (modality, token) in enumerate(placeholders.items(), 1):
        shown, given = tokens == token, [of for name, of in items if name == modality]
        _refuse_neighbours(modality, shown[0], len(given) if modality not in apart else _rows_of(given))
        types[shown] = number
        for name in (f"{modality}_grid_thw", *(() if apart else (SECONDS,))):
            if found := [of[name] for of in given if name in of]:
                inputs[name] = torch.cat(found)
    positions = rule.get_rope_index(tokens, mm_token_type_ids=types, **inputs)[0][:, 0]  # [3, n]
    return positions.numpy().astype(np.int64), int(positions[:, -1].max()) + 1 - len(token_ids)


def _rows_of(videos: Sequence[Mapping[str, torch.Tensor]]) -> int:
    return sum(int(inputs[VIDEO_GRID][0, 0]) for inputs in videos)


def _refuse_neighbours(modality: str, shown: torch.Tensor, count: int) -> None:
    """Refuse a prompt whose tokens `shown` [n] bool are in fewer places than the `count` items of a modality."""
    places = int(shown[0]) + int((shown.int().diff() > 0).sum())
    if places != count:
        raise RequestError(
            f"{count} {modality}s are in {places} places of the prompt, and this model needs a token between two",
            fix=f"put <|vision_start|> and <|vision_end|> around each {modality}, as the chat template does",
        )
