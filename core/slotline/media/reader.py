"""Reader of the images and videos of one request, wherever they lie."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from slotline.media.fetch import fetch
from slotline.media.pictures import frames_of_images, open_image, open_video
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.config.validators import size_in_bytes
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

NAMED = ("image", "video")
"""Modalities whose items may be named by a path, URL or data URI."""


class MediaReader:
    """Reader of a request's images and videos, which counts them.

    Args:
        config: the limits.
        remote: whether the request came from elsewhere, so that it names no file outside of `multimodal.folder`.
    """

    def __init__(self, config: MultimodalConfig, *, remote: bool) -> None:
        self._config, self._remote = config, remote
        self._items, self._pixels, self._bytes = 0, 0, size_in_bytes(config.max_bytes)

    def read(self, modality: str, given: Any) -> Any:
        """Return an item as a model reads it. Items that are no name of a file are counted, and returned as they are.

        Args:
            modality: ``image`` or ``video``. Items of others are only counted.
            given: a path, URL, data URI or the bytes of a file. A request from elsewhere may give nothing else.

        Raises:
            RequestError: if it is not allowed or cannot be read, or a limit is exceeded.
        """
        self._items += 1
        if self._items > self._config.max_items:
            raise RequestError(
                f"the request has more than multimodal.max_items = {self._config.max_items} images and other items",
                fix="give fewer, or raise the limit",
            )
        if modality not in NAMED or (not self._remote and not isinstance(given, str | Path | bytes)):
            _refuse_no_frames(given)
            return given
        if isinstance(given, str) and given.startswith("data:video/jpeg;base64,"):
            return self._frames(given)
        data = self._data(modality, given)
        self._take(len(data), modality)
        try:
            if modality == "image":
                return open_image(data, self._claim)
            return open_video(data, self._claim, fps=self._config.video_fps, most=self._config.video_frames)
        except ImportError as error:
            raise RequestError(f"{modality}s need pillow", fix="install slotline[multimodal]") from error

    def _frames(self, uri: str) -> dict[str, Any]:
        """Return the frames of a video as JPEG files, in base64 with commas between."""
        parts = [_decoded(part, "video") for part in uri.partition(",")[2].split(",")]
        self._take(sum(map(len, parts)), "video")
        return frames_of_images([open_image(part, self._claim) for part in parts], self._config.video_fps)

    def _data(self, modality: str, given: Any) -> bytes:
        """Return the bytes of a file."""
        if isinstance(given, bytes):
            return given
        text = str(given) if isinstance(given, str | Path) else ""
        scheme = "" if isinstance(given, Path) else text.partition(":")[0].lower()
        if scheme in ("http", "https"):
            return fetch(text, self._config, self._bytes)
        if scheme == "data":
            head, _, body = text.partition(",")
            if not head.endswith(";base64"):
                raise RequestError(
                    f"{modality}={safe_repr(text)} is no data URI in base64",
                    fix="give 'data:image/png;base64,...'",
                )
            return _decoded(body, modality)
        if scheme == "file":
            return self._file(modality, Path(unquote(urlsplit(text).path)))
        if not self._remote and text:
            return self._file(modality, Path(text))
        media_type = {"image": "image/png", "video": "video/mp4"}[modality]
        raise RequestError(
            f"{modality}={safe_repr(given)} is neither a data URI nor a URL",
            fix=f"send the {modality} itself, as 'data:{media_type};base64,...'",
        )

    def _file(self, modality: str, path: Path) -> bytes:
        """Read a file, for a request from elsewhere under the allowed folder alone."""
        allowed = self._config.folder
        try:
            found = path.resolve(strict=not self._remote)
            if self._remote and not (allowed and found.is_relative_to(Path(allowed).resolve())):
                raise RequestError(
                    f"{modality}={safe_repr(str(path), 200)} is not under multimodal.folder = {allowed!r}",
                    fix="send the file itself as a data URI, or name one under this folder",
                )
            if not found.is_file():
                raise FileNotFoundError("no such file")
            with found.open("rb") as file:
                return file.read(self._bytes + 1)
        except (OSError, ValueError) as error:
            raise RequestError(
                f"{modality}={safe_repr(str(path), 200)} cannot be read: {getattr(error, 'strerror', None) or error}",
                fix=f"give the path of a file, an opened {modality}, or a data URI",
            ) from error

    def _take(self, count: int, modality: str) -> None:
        """Count bytes of files."""
        self._bytes -= count
        if self._bytes < 0:
            raise RequestError(
                f"the {modality} files of the request have more than multimodal.max_bytes = {self._config.max_bytes}",
                fix="give smaller or fewer files, or raise the limit",
            )

    def _claim(self, pixels: int) -> None:
        """Count pixels before they are decoded."""
        self._pixels += pixels
        if self._pixels > self._config.max_pixels:
            raise RequestError(
                f"the images and frames of the request have more than multimodal.max_pixels = "
                f"{self._config.max_pixels} pixels",
                fix="give smaller or fewer ones, or raise the limit",
            )


def with_opened_items(prompt: Any, config: MultimodalConfig) -> Any:
    """Return a prompt of this process with its named images and videos opened. Others are returned as they are.

    Raises:
        RequestError: if one cannot be read.
    """
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(data, Mapping) or data.keys().isdisjoint(NAMED):
        return prompt
    reader, opened = MediaReader(config, remote=False), dict(data)
    for modality in NAMED:
        if modality in data:
            items = data[modality] if isinstance(data[modality], list | tuple) else [data[modality]]
            opened[modality] = [reader.read(modality, item) for item in items if item is not None]
    return {**prompt, "multi_modal_data": opened}


def _refuse_no_frames(given: Any) -> None:
    frames = given.get("frames") if isinstance(given, Mapping) else None
    if frames is not None and hasattr(frames, "__len__") and len(frames) == 0:
        raise RequestError("a video has no frames", fix="give a video with at least one")


def _decoded(text: str, modality: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"{modality}={safe_repr(text, 40)} is no base64: {error}", fix="encode the whole file in base64"
        ) from error
