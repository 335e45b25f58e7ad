"""Transcripts as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.llm.transcripts import Segment


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as a SubRip file."""
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as a WebVTT file."""
    cues = (f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_line(one)}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """Return a segment's text on one line, without what would begin the times of a cue."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    left = round(seconds * 1000)
    return f"{left // 3_600_000:02}:{left // 60_000 % 60:02}:{left // 1000 % 60:02}{point}{left % 1000:03}"
