"""Images of Phi-4 multimodal: crops of one size and a small whole, and the encoder that lies inside the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.utils import is_torchvision_available

from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import RequestError

PIXELS, SIZES, MASK = "image_pixel_values", "image_sizes", "image_attention_mask"
EXAMPLE_CROPS = 3
"""Crops along each side of the made-up image."""
_FORM = (
    f"give a PIL image, or {{'{PIXELS}': ..., '{SIZES}': ..., '{MASK}': ...}} as the checkpoint's processor makes them"
)


class CroppedImages:
    """Images for the checkpoint's processor, or tensors that this processor has made.

    transformers builds the processor on torchvision, so it is read with the first image.

    Args:
        path: the checkpoint's folder.
        modality: images.
        config: of the vision encoder.
    """

    def __init__(self, path: Path, modality: Modality, config: Any) -> None:
        self._path, self._modality = path, modality
        self._crop, self._patches = int(config.crop_size), int(config.image_size) // int(config.patch_size)
        self._channels = int(config.num_channels)
        self._processor: Any = None

    def process(self, image: Any) -> ProcessedItem:
        """Return the inputs of an image, with a placeholder token for each embedding.

        Args:
            image: a PIL image, or a mapping with ``image_pixel_values`` [1, 1 + crops, channels, crop, crop],
                ``image_sizes`` [1, 2] in pixels and ``image_attention_mask`` [1, 1 + crops, patches, patches].

        Raises:
            RequestError: if it cannot be read.
        """
        try:
            found = image if isinstance(image, Mapping) else self._read(image)
            pixels, sizes, mask = (torch.as_tensor(found[name]) for name in (PIXELS, SIZES, MASK))
        except RequestError:
            raise
        except Exception as error:  # a processor may raise anything on what is no image
            raise RequestError(f"image={image!r:.60} cannot be read: {error!r}", fix=_FORM) from error
        self._check(pixels, sizes, mask)
        return ProcessedItem(
            modality=self._modality.name,
            token_ids=[self._modality.placeholder_token_id] * num_embeddings(sizes[0], mask[0], self._crop),
            inputs={PIXELS: pixels.float(), SIZES: sizes.long(), MASK: mask.bool()},
        )

    def example(self) -> ProcessedItem:
        """Return a grey square."""
        count, side = 1 + EXAMPLE_CROPS**2, EXAMPLE_CROPS * self._crop
        return self.process(
            {
                PIXELS: torch.zeros(1, count, self._channels, self._crop, self._crop),
                SIZES: torch.tensor([[side, side]]),
                MASK: torch.ones(1, count, self._patches, self._patches),
            }
        )

    def _read(self, image: Any) -> Any:
        if self._processor is None:
            if not is_torchvision_available():
                raise RequestError(
                    "the image processor of Phi-4 multimodal needs torchvision, which is not installed",
                    fix=f"install torchvision, or {_FORM}",
                )
            from transformers import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(
                str(self._path), local_files_only=True, trust_remote_code=False
            )
        return self._processor(images=[image], return_tensors="pt")

    def _check(self, pixels: torch.Tensor, sizes: torch.Tensor, mask: torch.Tensor) -> None:
        """Refuse tensors that do not fit each other."""
        crop = self._crop
        right = tuple(sizes.shape) == (1, 2) and bool((sizes > 0).all()) and not bool((sizes % crop).any())
        count = 1 + int(sizes.prod()) // crop**2 if right else 0
        wanted = [1, count, self._channels, crop, crop], [1, count, self._patches, self._patches]
        if not right or (list(pixels.shape), list(mask.shape)) != wanted:
            raise RequestError(
                f"{PIXELS} {list(pixels.shape)} and {MASK} {list(mask.shape)} do not fit {SIZES} = {sizes.tolist()}, "
                f"which are multiples of {crop} and have a crop for each {crop} x {crop} pixels and one for the whole",
                fix=_FORM,
            )


class ImageEncoder(nn.Module):
    """The images' part of a Phi-4 multimodal model, which transformers calls with a prompt's tokens.

    Args:
        embed: its `image_embed`.
        config: of the whole model.
    """

    def __init__(self, embed: nn.Module, config: Any) -> None:
        super().__init__()
        self.image_embed, self._config = embed, deepcopy(config)
        for module in embed.modules():
            if getattr(module, "config", None) is config.vision_config:
                module.config = self._config.vision_config  # stays as it is when the decoder's attention is set
            if hasattr(module, "is_causal"):  # True, which SDPA goes by where all patches are seen, and eager never
                module.is_causal = False  # type: ignore[assignment]

    def get_image_features(
        self, image_pixel_values: torch.Tensor, image_sizes: torch.Tensor, image_attention_mask: torch.Tensor, **_: Any
    ) -> Any:
        """Return embeddings [n, hidden_size] of each image as `pooler_output`."""
        items = zip(image_pixel_values, image_sizes, image_attention_mask, strict=True)
        return SimpleNamespace(pooler_output=[self._embeddings(*item) for item in items])

    def _embeddings(self, pixels: torch.Tensor, size: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = num_embeddings(size, mask, int(self._config.vision_config.crop_size))
        tokens = torch.full((1, count), int(self._config.vision_config.image_token_id), device=pixels.device)
        room = pixels.new_zeros((1, count, int(self._config.hidden_size)))
        found: torch.Tensor = self.image_embed(tokens, room, pixels[None], size[None], mask[None])[0]
        return found


class TextAlone(nn.Module):
    """In the place of a decoder's encoders: embeddings of a prompt's tokens stay as they are."""

    def forward(self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return `inputs_embeds`."""
        return inputs_embeds


def num_embeddings(size: torch.Tensor, mask: torch.Tensor, crop: int) -> int:
    """Return the number of an image's embeddings: seen places and an end for each row, of the crops and of the whole.

    Args:
        size: [2], height and width of all crops in pixels.
        mask: [1 + crops, patches, patches], which patches of each crop are seen. Two by two become one place.
        crop: pixels of a crop's side.
    """
    rows, columns = (int(side) // crop for side in size)
    places = mask[1 : 1 + rows * columns, ::2, ::2]
    side = places.shape[-1]
    seen = places.reshape(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)
    height, width = int(seen[:, 0].sum()), int(seen[0].sum())
    return height * (width + 1) + 1 + side * (side + 1)
