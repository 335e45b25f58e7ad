"""From an image to a model's inputs, by the checkpoint's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slotline.plugins.model_families import processors, tiled_images
from slotline.plugins.model_families.text_joints import TextJoints
from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.remote_code import remote_code

EXAMPLE_SIZE = 1024
EXAMPLE_SIDES = (1024, 768, 512, 341)
"""Pixels of the longer and the shorter side of made-up images. Processors resize images or cut them into tiles by their
proportions, so few others give more embeddings."""
_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ImageProcessing:
    """A checkpoint's processor, run on one image at a time.

    transformers' processors expand the image token of a text into the image's tokens. Run on only that token, they
    return both the expansion and the tensors, by the model's own rules.

    Raises:
        ModelError: if the folder has no processor that can be loaded.
    """

    def __init__(self, path: Path, modality: Modality) -> None:
        try:
            from PIL import Image

            self._image: Any = Image
            self._processor: Any = self._read(path)
        except Exception as error:  # transformers raises many kinds, by file and version
            if code := remote_code(path, "AutoProcessor", "AutoImageProcessor", "AutoTokenizer"):
                raise ModelError(
                    f"the image processor in {str(path)!r} needs code of its own, which is never run: {code}",
                    fix="use a checkpoint whose processor transformers knows, or remove auto_map if it does",
                ) from error
            raise ModelError(
                f"no image processor in {str(path)!r}: {str(error).splitlines()[0] if str(error) else error!r}",
                fix="put preprocessor_config.json (or processor_config.json) and the tokenizer's files there, and "
                "install slotline[multimodal] for Pillow",
            ) from error
        self._modality = modality
        tokenizer = getattr(self._processor, "tokenizer", None)
        self._joints = None if tokenizer is None else TextJoints(tokenizer)

    def _read(self, path: Path) -> Any:
        """Return the processor of a folder, without its parts for videos and sound."""
        processor = processors.for_images(path)
        self._token = processor.image_token
        return processor

    def _processed(self, image: Any) -> tuple[list[int], Any]:
        """Return the tokens and the inputs of an image."""
        found = self._processor(text=self._token, images=[image], return_tensors="pt", add_special_tokens=False)
        return found["input_ids"].reshape(-1).tolist(), found

    def join(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """See `slotline.registry.contracts.model_family.JoiningModel.join`."""
        return [*left, *right] if self._joints is None else self._joints.join(left, right)

    def process(self, image: Any) -> ProcessedItem:
        """Return the inputs and the expansion of an image: a PIL image or an array [height, width, 3] of 0 to 255.

        Raises:
            RequestError: if the processor cannot read it.
        """
        if isinstance(image, str | bytes):
            raise RequestError(
                f"image={image!r:.60} is no image", fix="open it first, with PIL.Image.open, and give the image"
            )
        try:
            token_ids, found = self._processed(image)
        except Exception as error:  # a processor may raise anything on what is no image
            raise RequestError(
                f"image={image!r:.60} cannot be read by {type(self._processor).__name__}: {error}",
                fix="give a PIL image, or an array [height, width, 3] of numbers from 0 to 255",
            ) from error
        return ProcessedItem(
            modality=self._modality.name,
            token_ids=token_ids,
            inputs={n: value for n, value in found.items() if n not in _TEXT and isinstance(value, torch.Tensor)},
        )

    def example(self) -> ProcessedItem:
        """Return the grey rectangle with the most tokens."""
        found = tiled_images.largest(self._processor)
        sizes = [(side, EXAMPLE_SIZE) for side in EXAMPLE_SIDES] if found is None else [found]
        items = [self.process(self._image.new("RGB", (width, height), (128, 128, 128))) for height, width in sizes]
        return max(items, key=lambda item: len(item.token_ids))
