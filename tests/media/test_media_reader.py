"""Images and videos by path, data URI and bytes: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotline.media.reader import MediaReader
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.errors import RequestError

Image: Any = pytest.importorskip("PIL.Image", reason="images need Pillow")


def picture(seed: int = 0, size: tuple[int, int] = (6, 4)) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Any, form: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def read(given: Any, modality: str = "image", *, remote: bool = False, **settings: Any) -> Any:
    return MediaReader(MultimodalConfig(**settings), remote=remote).read(modality, given)


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that says to have so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def test_a_path_a_uri_bytes_and_an_array_show_the_same(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(data := encoded(picture()))
    path = tmp_path / "a b.png"
    for given in (path, str(path), path.as_uri(), data, uri(data)):
        assert np.array_equal(np.asarray(read(given)), np.asarray(picture()))
    array = np.asarray(picture())
    assert read(array) is array


def test_an_image_is_turned_and_made_rgb_as_transformers_does(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    (tmp_path / "turned.jpg").write_bytes(encoded(picture(), "JPEG", exif=exif))
    (tmp_path / "clear.png").write_bytes(encoded(picture().convert("RGBA")))
    (tmp_path / "few.gif").write_bytes(encoded(picture(), "GIF"))
    for path in sorted(tmp_path.iterdir()):
        found = read(path)
        assert np.array_equal(np.asarray(found), np.asarray(load_image(str(path))))
    assert read(tmp_path / "turned.jpg").size == (4, 6)


def test_over_http_only_files_under_the_folder_are_read(tmp_path: Path) -> None:
    (inside := tmp_path / "in").mkdir()
    (inside / "a.png").write_bytes(encoded(picture()))
    (tmp_path / "b.png").write_bytes(encoded(picture()))
    (inside / "link.png").symlink_to(tmp_path / "b.png")
    folder = str(inside)
    assert read((inside / "a.png").as_uri(), remote=True, folder=folder).size == (6, 4)
    for path in (tmp_path / "b.png", inside / "link.png", inside / ".." / "b.png"):
        with pytest.raises(RequestError, match=r"is not under multimodal.folder"):
            read(f"file://{path}", remote=True, folder=folder)
    with pytest.raises(RequestError, match=r"is not under multimodal.folder = ''"):
        read((inside / "a.png").as_uri(), remote=True)
    for given in (str(inside / "a.png"), [str(inside / "a.png")], {"frames": []}, 5, None):
        with pytest.raises(RequestError, match=r"is neither a data URI nor a URL"):
            read(given, remote=True, folder=folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"no image", "an image cannot be read"),
        (encoded(picture())[:60], "an image cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "an image cannot be read"),
        ("data:image/png;base64,ab!", "is no base64"),
        ("data:image/png,abc", "is no data URI in base64"),
        ("none.png", "'none.png' cannot be read: No such file|no such file"),
        (bomb(30_000, 30_000), "an image (of 30000 x 30000 is larger than|cannot be read)"),
        (bomb(9_500, 9_500), "an image of 9500 x 9500 is larger than 89478485 pixels"),
    ],
)
def test_what_is_no_image_is_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read(given)
    assert caught.value.fix


def test_items_bytes_and_pixels_of_a_request_are_counted_together() -> None:
    data = encoded(picture())
    reader = MediaReader(MultimodalConfig(max_items=2), remote=False)
    reader.read("image", data)
    reader.read("audio", object())
    with pytest.raises(RequestError, match=r"more than multimodal.max_items = 2 images"):
        reader.read("image", data)
    for settings, message in (
        ({"max_bytes": f"{2 * len(data) / 1000 - 0.001}KB"}, "more than multimodal.max_bytes"),
        ({"max_pixels": 47}, "more than multimodal.max_pixels = 47"),
    ):
        reader = MediaReader(MultimodalConfig(**settings), remote=False)  # type: ignore[arg-type]
        reader.read("image", data)
        with pytest.raises(RequestError, match=message):
            reader.read("image", data)


def test_frames_of_an_animation_are_evenly_spread() -> None:
    shades = [Image.new("RGB", (5, 3), (shade, shade, shade)) for shade in range(0, 160, 16)]
    data = encoded(shades[0], "GIF", save_all=True, append_images=shades[1:], duration=250)  # 2.5 seconds
    found = read(uri(data, "image/gif"), "video", remote=True)
    assert found["frames"].shape == (5, 3, 5, 3)
    assert found["frames"][:, 0, 0, 0].tolist() == [0, 32, 64, 112, 144]
    assert found["fps"] == pytest.approx(2)
    assert len(read(data, "video", video_frames=3)["frames"]) == 3
    with pytest.raises(RequestError, match=r"max_pixels"):
        read(data, "video", max_pixels=5 * 15 - 1)


def test_frames_may_be_jpeg_files_with_commas_between() -> None:
    parts = [base64.b64encode(encoded(picture(seed), "JPEG")).decode() for seed in range(3)]
    found = read("data:video/jpeg;base64," + ",".join(parts), "video", remote=True)
    assert (found["frames"].shape, found["fps"]) == ((3, 4, 6, 3), 2.0)
    other = base64.b64encode(encoded(picture(0, (8, 8)), "JPEG")).decode()
    with pytest.raises(RequestError, match=r"frames of a video have the sizes"):
        read(f"data:video/jpeg;base64,{parts[0]},{other}", "video")


@pytest.mark.parametrize("frames", [[], np.zeros((0, 4, 4, 3), np.uint8)])
def test_a_video_without_frames_is_refused(frames: Any) -> None:
    with pytest.raises(RequestError, match=r"a video has no frames"):
        read({"frames": frames, "fps": 2}, "video")
    whole = {"frames": np.zeros((1, 4, 4, 3), np.uint8), "fps": 2}
    assert read(whole, "video") is whole


def test_a_film_is_decoded_and_what_is_none_is_refused() -> None:
    for wrong in (b"", b"no film"):
        with pytest.raises(RequestError, match=r"a video cannot be read|need av"):
            read(wrong, "video")
    av: Any = pytest.importorskip("av", reason="films need PyAV")
    for frames in (20, 0):
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as film:
            stream = film.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
            for index in range(frames):
                film.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (32, 16), (12 * index,) * 3))))
            film.mux(stream.encode())
        if frames:
            found = read(file.getvalue(), "video")
            assert (found["frames"].shape, found["fps"]) == ((4, 16, 32, 3), pytest.approx(2))
            assert np.abs(found["frames"].mean((1, 2, 3)) - 12 * np.array([0, 6, 13, 19])).max() < 8
        else:
            with pytest.raises(RequestError, match=r"a video has no frames|a video cannot be read"):
                read(file.getvalue(), "video")
