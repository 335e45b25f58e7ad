"""Images of Pixtral's encoder: rows of patches, with a token behind each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slotline.plugins.model_families import processors
from slotline.plugins.model_families.image_processing import ImageProcessing
from slotline.registry.contracts.model_family import Modality

MODEL_TYPE = "pixtral"
"""Of the encoder's configuration."""
_BREAK, _END = ("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")
"""Settings of transformers' PixtralProcessor that name the tokens, and their defaults."""


class RowProcessing(ImageProcessing):
    """A checkpoint's image processor, with the rule of transformers' PixtralProcessor for an image's tokens.

    That processor itself can only be imported with torchvision.

    Args:
        path: the checkpoint's folder.
        modality: images.
        patch_size: pixels along each side of what becomes one token.

    Raises:
        ModelError: if the folder has no image processor or no tokenizer that can be loaded.
    """

    def __init__(self, path: Path, modality: Modality, patch_size: int) -> None:
        self._patch_size = patch_size
        super().__init__(path, modality)

    def _read(self, path: Path) -> Any:
        from transformers import AutoImageProcessor, AutoTokenizer

        said = processors.settings(path)
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        self._row_end, self._image_end = (
            tokenizer.convert_tokens_to_ids(said.get(key, default)) for key, default in (_BREAK, _END)
        )
        return AutoImageProcessor.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)

    def _processed(self, image: Any) -> tuple[list[int], Any]:
        found = self._processor(images=[image], patch_size=self._patch_size, return_tensors="pt")
        height, width = (int(size) // self._patch_size for size in found["image_sizes"][0])
        row = [*[self._modality.placeholder_token_id] * width, self._row_end]
        return [*(row * height)[:-1], self._image_end], found
