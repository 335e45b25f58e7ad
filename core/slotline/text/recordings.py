"""Recordings as samples: read from the bytes of a file, checked, and brought to the rate that a model hears."""

from __future__ import annotations

import wave
from io import BytesIO
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Samples = npt.NDArray[np.float32]
MOST_SAMPLES = 2**28
"""Of all channels of a file: 1 GiB as float32, more than four hours at 16 kHz."""
RATES = (1_000, 1_000_000)
"""Lowest and highest number of samples in a second."""
_EXTRA = "install slotline[audio]"
_FORM = "give an array [n] of samples, [(array, sampling rate)], or the bytes of a file"


def as_samples(given: Any, rate: int) -> Samples:
    """Return a recording as samples [n] float32 of `rate` in a second, -1 to 1 at full volume.

    Args:
        given: samples [n] of this rate, a pair of samples and their own rate, or the bytes of a file.

    Raises:
        RequestError: if it is no recording, has no samples or some that are no numbers, or cannot be resampled.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        given = read_recording(bytes(given))
    samples, own = given if isinstance(given, tuple) and len(given) == 2 else (given, rate)
    try:
        found = np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        found = np.zeros(0, np.float32)
    if found.ndim != 1 or len(found) == 0:
        raise RequestError(f"audio={safe_repr(samples, 60)} is no recording", fix=_FORM)
    if not np.isfinite(found).all():
        place = int(np.flatnonzero(~np.isfinite(found))[0])
        raise RequestError(
            f"sample {place} of the audio is {found[place]}, so it is no recording", fix="give finite numbers"
        )
    return _resampled(found, own, rate)


def read_recording(data: bytes) -> tuple[Samples, int]:
    """Return the samples [n] of a file's bytes, channels averaged, and how many a second has.

    WAV files of whole numbers are read by Python itself, others by soundfile.

    Raises:
        RequestError: if they are no recording, or soundfile is needed and not installed.
    """
    try:
        return _read_wav(data)
    except (wave.Error, EOFError):
        pass
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise RequestError(
            f"the audio of {len(data):,} bytes is no WAV file of whole numbers, and soundfile is not installed",
            fix=f"send a WAV file with PCM samples, or {_EXTRA} for FLAC, OGG, MP3 and other WAV files",
        ) from error
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            _refuse_long(file.frames * file.channels)
            return file.read(dtype="float32", always_2d=True).mean(axis=1), int(file.samplerate)
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        raise RequestError(f"the audio cannot be read: {error}", fix="send a WAV, FLAC, OGG or MP3 file") from error


def _read_wav(data: bytes) -> tuple[Samples, int]:
    """Read PCM samples of 8, 16, 24 or 32 bits."""
    with wave.open(BytesIO(data)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        _refuse_long(len(data) // width)
        raw = file.readframes(file.getnframes())
    raw = raw[: len(raw) // (width * channels) * width * channels]
    values: Samples
    if width == 1:
        values = np.frombuffer(raw, np.uint8).astype(np.float32) - 128
    elif width == 3:
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values, width = padded.view("<i4")[:, 0].astype(np.float32), 4
    elif width in (2, 4):
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32)
    else:
        raise wave.Error(f"samples of {width} bytes")
    samples: Samples = (values / np.float32(2 ** (8 * width - 1))).reshape(-1, channels).mean(axis=1)
    return samples, rate


def _refuse_long(samples: int) -> None:
    if samples > MOST_SAMPLES:
        raise RequestError(
            f"the audio has {samples:,} samples, and {MOST_SAMPLES:,} are read at most", fix="cut it into parts"
        )


def _resampled(samples: Samples, rate: Any, wanted: int) -> Samples:
    """Return samples at another rate, through SciPy's polyphase filter."""
    if rate == wanted:
        return samples
    whole = isinstance(rate, int | np.integer) and not isinstance(rate, bool)
    if not whole or not RATES[0] <= rate <= RATES[1]:
        raise RequestError(
            f"the audio has {safe_repr(rate)} samples a second, the model takes {wanted}",
            fix=f"give a whole number from {RATES[0]:,} to {RATES[1]:,}",
        )
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise RequestError(
            f"the audio has {rate} samples a second, the model takes {wanted}, and SciPy is not installed",
            fix=f"resample it to {wanted}, or {_EXTRA}, with which slotline does",
        ) from error
    common = gcd(int(rate), wanted)
    found: Samples = resample_poly(samples, wanted // common, int(rate) // common).astype(np.float32)
    return found
