"""Frames of videos: the checkpoint's video processor, and models that take every frame as an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import is_torchvision_available

from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import RequestError

PIXELS = "pixel_values_videos"
EXAMPLE_FRAMES = 32
"""Frames of the made-up video."""


class FrameReader:
    """A checkpoint's video processor, read with the first frames since it needs torchvision."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._processor: Any = None

    def read(self, frames: Any) -> Any:
        """Return what the processor makes of `frames` [frames, height, width, 3] of 0 to 255.

        Raises:
            RequestError: if torchvision is not installed.
        """
        if self._processor is None:
            if not is_torchvision_available():
                raise RequestError(
                    "the video processors of transformers need torchvision, which is not installed",
                    fix=f"install torchvision, or give '{PIXELS}' and the other tensors that these processors make",
                )
            from transformers import AutoVideoProcessor

            self._processor = AutoVideoProcessor.from_pretrained(
                str(self._path), local_files_only=True, trust_remote_code=False
            )
        return self._processor(videos=[np.asarray(frames)], do_sample_frames=False, return_tensors="pt")


class FrameVideos:
    """Videos whose frames are images of one size, of which every two by two patches become one token.

    A last token stands for the embedding that ends a video, as in LLaVA-OneVision.

    Args:
        path: the checkpoint's folder.
        modality: videos.
        config: of the vision encoder.
    """

    def __init__(self, path: Path, modality: Modality, config: Any) -> None:
        self._modality, self._reader = modality, FrameReader(path)
        self._shape = (int(config.num_channels), int(config.image_size), int(config.image_size))
        self._tokens_per_frame = math.ceil(int(config.image_size) // int(config.patch_size) / 2) ** 2

    def process(self, video: Any) -> ProcessedItem:
        """Return the inputs of a video, with its placeholder tokens.

        Args:
            video: a mapping with ``frames`` [frames, height, width, 3] of 0 to 255 as they are to be seen, or with
                ``pixel_values_videos`` [1, frames, channels, height, width] as the checkpoint's processor makes them.

        Raises:
            RequestError: if it cannot be read.
        """
        form = f"give {{'frames': array [frames, height, width, 3]}}, or {{'{PIXELS}': {self._wanted()}}}"
        if not isinstance(video, Mapping) or not {"frames", PIXELS} & video.keys():
            raise RequestError(f"video={video!r:.60} is no video", fix=form)
        try:
            found = self._reader.read(video["frames"]) if "frames" in video else video
            pixels = torch.as_tensor(found[PIXELS]).float()
        except RequestError:
            raise
        except Exception as error:  # a processor may raise anything on what is no video
            raise RequestError(f"video={video!r:.60} cannot be read: {error}", fix=form) from error
        if pixels.ndim != 5 or tuple(pixels.shape) != (1, max(pixels.shape[1], 1), *self._shape):
            raise RequestError(f"{PIXELS} has the shape {list(pixels.shape)}, not {self._wanted()}", fix=form)
        count = pixels.shape[1] * self._tokens_per_frame + 1
        return ProcessedItem(
            modality=self._modality.name,
            token_ids=[self._modality.placeholder_token_id] * count,
            inputs={PIXELS: pixels},
        )

    def example(self) -> ProcessedItem:
        """Return a grey video."""
        return self.process({PIXELS: torch.zeros(1, EXAMPLE_FRAMES, *self._shape)})

    def _wanted(self) -> str:
        return f"[1, frames, {', '.join(map(str, self._shape))}]"
