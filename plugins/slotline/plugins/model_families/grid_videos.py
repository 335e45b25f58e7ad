"""Videos that are cut into a grid of patches over time, rows and columns (the Qwen-VL family)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from transformers import AutoTokenizer

from slotline.plugins.model_families.video_frames import PIXELS, FrameReader
from slotline.plugins.model_families.video_pruning import KEPT, kept_tokens
from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import RequestError

GRID, PATCHES, SECONDS = "video_grid_thw", PIXELS, "second_per_grid_ts"
EXAMPLE_GRID = (4, 16, 16)
"""Groups of merged patches of the made-up video, over time, rows and columns."""
_FORM = f"give {{'frames': array [frames, height, width, 3], 'fps': number}}, or {{'{PATCHES}': ..., '{GRID}': ...}}"


def times_writer(path: Path, config: Any) -> Callable[[float, list[int]], list[int]]:
    """Return what writes a time in front of placeholders, as the processor of Qwen3-VL does.

    Args:
        path: the checkpoint's folder, which has a tokenizer.
        config: of the whole model.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    start, end = int(config.vision_start_token_id), int(config.vision_end_token_id)

    def write(seconds: float, row: list[int]) -> list[int]:
        time = tokenizer(f"<{seconds:.1f} seconds>", add_special_tokens=False)["input_ids"]
        return [*time, start, *row, end]

    return write


class VideoProcessing:
    """Videos as frames, for the checkpoint's video processor, or as patches that this processor has made.

    Args:
        path: the checkpoint's folder.
        modality: videos.
        config: of the vision encoder.
        write_times: returns the tokens of a row of patches over time, of a time in seconds and its placeholders. None
            for a model that writes no times between them.
    """

    def __init__(
        self, path: Path, modality: Modality, config: Any, write_times: Callable[[float, list[int]], list[int]] | None
    ) -> None:
        self._modality, self._write_times = modality, write_times
        self._merge, self._frames = int(config.spatial_merge_size), int(config.temporal_patch_size)
        self._width = int(config.in_channels) * self._frames * int(config.patch_size) ** 2
        self._reads_seconds = write_times is not None or hasattr(config, "tokens_per_second")
        self._reader = FrameReader(path)

    def process(self, video: Any) -> ProcessedItem:
        """Return the inputs of a video, with a placeholder token for each group of merged patches.

        Args:
            video: a mapping with ``frames`` [frames, height, width, 3] of 0 to 255 as they are to be seen, and ``fps``,
                their number in a second of the video. Or a mapping with ``pixel_values_videos`` [patches, width] and
                ``video_grid_thw`` [1, 3]. A model that reads times also needs ``fps`` or ``second_per_grid_ts``.

        Raises:
            RequestError: if it cannot be read.
        """
        if not isinstance(video, Mapping) or not {"frames", PATCHES} & video.keys():
            raise RequestError(f"video={video!r:.60} is no video", fix=_FORM)
        try:
            found = self._reader.read(video["frames"]) if "frames" in video else video
            grid, patches = (torch.as_tensor(found[name]) for name in (GRID, PATCHES))
            seconds = self._seconds(video)
        except RequestError:
            raise
        except Exception as error:  # a processor may raise anything on what is no video
            raise RequestError(f"video={video!r:.60} cannot be read: {error}", fix=_FORM) from error
        self._check(grid, patches)
        further = {} if seconds is None else {SECONDS: torch.tensor([seconds], dtype=torch.float64)}
        return ProcessedItem(
            modality=self._modality.name,
            token_ids=self._tokens(grid, seconds, len(video.get("frames", range(int(grid[0, 0]) * self._frames)))),
            inputs={PATCHES: patches.float(), GRID: grid.long(), **further},
        )

    def prune(self, video: ProcessedItem, rate: float) -> ProcessedItem:
        """Return a video with fewer tokens, see `video_pruning`. Times between them stay."""
        kept = kept_tokens(video.inputs[PATCHES], int(video.inputs[GRID][0, 0]), self._merge**2, rate)
        left, placeholder = iter(kept.flatten().tolist()), self._modality.placeholder_token_id
        tokens = [token for token in video.token_ids if token != placeholder or next(left)]
        return evolve(video, token_ids=tokens, inputs={**video.inputs, KEPT: kept})

    def example(self) -> ProcessedItem:
        """Return a grey video."""
        time, rows, columns = EXAMPLE_GRID
        grid = torch.tensor([[time, rows * self._merge, columns * self._merge]])
        patches = torch.zeros((int(grid.prod()), self._width))
        return self.process({PATCHES: patches, GRID: grid, "fps": 1})

    def _tokens(self, grid: torch.Tensor, seconds: float | None, num_frames: int) -> list[int]:
        """Return a placeholder for each group of merged patches, with times if the model has them between rows."""
        count = int(grid[0, 0])
        row = [self._modality.placeholder_token_id] * (int(grid[0, 1:].prod()) // self._merge**2)
        if self._write_times is None or seconds is None:
            return row * count
        fps, tokens = self._frames / seconds, list[int]()
        for first in range(0, count * self._frames, self._frames):
            last = min(first + self._frames, num_frames) - 1  # the processor repeats a last frame that is missing
            tokens += self._write_times((first / fps + last / fps) / 2, row)
        return tokens

    def _seconds(self, video: Mapping[str, Any]) -> float | None:
        """Return the time between two rows of the grid, None for a model that does not read it."""
        if not self._reads_seconds:
            return None
        if SECONDS not in video and "fps" not in video:
            raise RequestError("the video has no fps, and this model reads times", fix=_FORM)
        found = video[SECONDS] if SECONDS in video else self._frames / float(video["fps"])
        seconds = float(np.asarray(found).reshape(-1)[0])
        if not 0 < seconds < float("inf"):
            raise RequestError(f"the video has {seconds} seconds between frames", fix=_FORM)
        return seconds

    def _check(self, grid: torch.Tensor, patches: torch.Tensor) -> None:
        """Refuse a grid that is none, and another number or size of patches than it has."""
        right = tuple(grid.shape) == (1, 3) and not grid.is_floating_point() and int(grid.min()) > 0
        right = right and not (grid[0, 1:] % self._merge).any()
        if not right or tuple(patches.shape) != (int(grid.prod()), self._width):
            raise RequestError(
                f"{PATCHES} {list(patches.shape)} do not fit {GRID} = {grid.tolist()}, whose rows and columns are "
                f"multiples of {self._merge} and whose patches have {self._width} numbers",
                fix=_FORM,
            )
