"""Transcripts of recordings, and the division of a window's tokens into segments by their timestamps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from attrs import define, field

SECONDS = 0.02
"""Between two timestamps, which is also the time of one of the encoder's states."""


@define(kw_only=True)
class Segment:
    """A part of a transcript.

    Attributes:
        id: its number from 0.
        seek: first frame of the window that it was heard in, in hundredths of a second.
        start, end: in seconds.
        text: as the tokenizer gives it, mostly with a space first.
        tokens: its tokens, timestamps included.
        temperature: that its tokens were drawn with.
        avg_logprob: mean of its window's log-probabilities, before the rules for transcripts. None unless asked for.
        compression_ratio: bytes of the text to those that zlib makes of it. Above 2.4 it mostly repeats itself.
        no_speech_prob: the model's probability that nobody speaks in its window. None unless asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None = None
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None


@define(kw_only=True)
class Transcript:
    """What was said in a recording.

    Attributes:
        text: all of it.
        language: of the recording by its code, as ``en``. Empty for a model that knows only English.
        duration: of the recording in seconds.
        segments: parts with times. A window without timestamps is one segment.
        num_tokens: tokens that the model wrote, those of language and silence included.
    """

    text: str
    language: str
    duration: float
    segments: list[Segment] = field(factory=list)
    num_tokens: int = 0


class Part(NamedTuple):
    """A part of a window's tokens, with its times as numbers of timestamps from the window's begin."""

    start: int
    end: int
    tokens: list[int]


def divide(tokens: Sequence[int], first_timestamp: int, frames: int) -> tuple[list[Part], int]:
    """Divide the tokens of a window between its pairs of timestamps, as transformers' Whisper does.

    Args:
        tokens: without the end of text.
        first_timestamp: the token of 0.00 s. Later ones are above it.
        frames: of the window that the recording has, two for each timestamp.

    Returns:
        The parts, and the number of frames after which the next window begins. Text behind the last pair was cut by the
        window's end, and is left to the next window.
    """
    stamps = [token >= first_timestamp for token in tokens]
    cuts = [place for place in range(1, len(tokens)) if stamps[place - 1] and stamps[place]]
    if not cuts:
        times = [token - first_timestamp for token in tokens if token >= first_timestamp]
        end = times[-1] if times and times[-1] > 0 else frames // 2
        return [Part(0, end, list(tokens))], frames
    closed = stamps[-2:] == [False, True]
    if closed:
        cuts.append(len(tokens))
    parts, begin = [], 0
    for cut in cuts:
        both = cut == cuts[-1] and not closed  # timestamps of the last pair are kept, to show that it was one
        first, last = tokens[begin] - first_timestamp, tokens[cut - 1] - first_timestamp
        parts.append(Part(first, last, list(tokens[begin : cut + both])))
        begin = cut
    return parts, frames if closed else 2 * parts[-1].end


def compression_ratio(text: str) -> float:
    """Return the bytes of a text for each byte that zlib makes of it."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
