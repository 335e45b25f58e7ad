"""Images, and frames of videos, from the bytes of files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of Pillow's that are read. Others run programs (EPS) or are not those of pictures to look at."""
Claim = Callable[[int], None]
"""Counts pixels before they are decoded, and raises if they are too many."""


def open_image(data: bytes, claim: Claim) -> Any:
    """Return an image in RGB, turned as its EXIF orientation says, as `load_image` of transformers does.

    Raises:
        RequestError: if it is no image that Pillow reads, or has too many pixels.
    """
    from PIL import ImageOps

    with _reading("an image"), _opened(data) as image:
        _claim(image, claim)
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")


def open_video(data: bytes, claim: Claim, *, fps: float, most: int) -> dict[str, Any]:
    """Return frames of a video, evenly spread, as ``{"frames": [frames, height, width, 3] uint8, "fps": ...}``.

    Animated images are read with Pillow, all others with PyAV where it is installed.

    Args:
        data: of a file.
        claim: counts the pixels of the frames that are kept.
        fps: frames that are taken for a second of the video.
        most: frames that are taken at most.

    Raises:
        RequestError: if it cannot be read, has no frame, or too many pixels.
    """
    from PIL import UnidentifiedImageError

    with _reading("a video"):
        try:
            image = _opened(data)
        except UnidentifiedImageError:
            return _film(data, claim, fps, most)
        with image:
            return _animation(image, claim, fps, most)


def frames_of_images(images: list[Any], fps: float) -> dict[str, Any]:
    """Return images of one size as the frames of a video.

    Raises:
        RequestError: if there are none, or their sizes differ.
    """
    if not images:
        raise RequestError("a video has no frames", fix="give a video with at least one")
    if len(sizes := {image.size for image in images}) > 1:
        raise RequestError(f"the frames of a video have the sizes {sorted(sizes)}", fix="give frames of one size")
    return {"frames": np.stack([np.asarray(image) for image in images]), "fps": fps}


def _opened(data: bytes) -> Any:
    from PIL import Image

    Image.init()
    return Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])


def _claim(image: Any, claim: Claim, frames: int = 1) -> None:
    """Refuse an image above Pillow's limit, from which Pillow itself only warns, and count its pixels."""
    from PIL import Image

    pixels, limit = image.size[0] * image.size[1], Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise RequestError(
            f"an image of {image.size[0]} x {image.size[1]} is larger than {limit} pixels",
            fix="give a smaller one",
        )
    claim(pixels * frames)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Say of any failure inside that `what` cannot be read. Decoders raise many kinds on wrong bytes."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{what} cannot be read: {one_line(error)}",
            fix=f"send a whole {'PNG, JPEG' if what == 'an image' else 'MP4, GIF'} or WebP file of fewer pixels",
        ) from error


def _spread(count: int, seconds: float, fps: float, most: int) -> list[int]:
    """Return the indices of frames to take of `count`, at `fps` and at most `most` of them."""
    wanted = max(1, min(count, most, round(seconds * fps)))
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]


def _animation(image: Any, claim: Claim, fps: float, most: int) -> dict[str, Any]:
    count = getattr(image, "n_frames", 1)
    durations = []
    for index in range(count):
        image.seek(index)
        durations.append(image.info.get("duration", 0) / 1000)
    seconds = sum(durations) or count / fps
    taken = _spread(count, seconds, fps, most)
    _claim(image, claim, len(taken))
    frames = []
    for index in taken:
        image.seek(index)
        frames.append(image.convert("RGB"))
    return frames_of_images(frames, len(taken) / seconds)


def _film(data: bytes, claim: Claim, fps: float, most: int) -> dict[str, Any]:
    try:
        import av
    except ImportError as error:
        raise RequestError(
            "videos other than GIF and WebP need av", fix="install slotline[video], or send frames"
        ) from error
    opened: Any = av.open(io.BytesIO(data), metadata_errors="ignore")
    with opened as film:
        if not film.streams.video:
            raise RequestError("a video has no frames", fix="give a video with at least one")
        stream = film.streams.video[0]
        claim(stream.codec_context.width * stream.codec_context.height)
        rate = float(stream.average_rate or stream.guessed_rate or fps)
        count = stream.frames or sum(1 for _ in film.decode(stream))
        if not count:
            raise RequestError("a video has no frames", fix="give a video with at least one")
        taken = _spread(count, count / rate, fps, most)
        claim(stream.codec_context.width * stream.codec_context.height * (len(taken) - 1))
        film.seek(0)
        wanted = set(taken)
        frames = [frame.to_image() for index, frame in enumerate(film.decode(stream)) if index in wanted]
    return frames_of_images(frames, len(taken) * rate / count)
