"""What ranks do at the moment: their stacks, and whether they wait for other ranks."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

_DEVICE_WAITS = "synchronize"  # torch's functions that wait for a device
_LOST = ("NCCL", "gloo", "Connection closed by peer", "Connection reset by peer")


def stack_of(thread: int, waits_in: Sequence[object]) -> tuple[str, bool]:
    """Return a thread's stack as text, and whether it waits for other ranks or for the device.

    Args:
        waits_in: objects whose methods wait for other ranks.
    """
    frame = sys._current_frames().get(thread)
    lines = "".join(traceback.format_stack(frame)).splitlines() if frame is not None else []
    text = "\n".join(line for line in lines if line.strip("^~ "))
    return text, any(_waits(one, waits_in) for one in _outwards(frame))


def lost_others(error: BaseException, waits_in: Sequence[object]) -> bool:
    """Return whether an error, or a cause of it, comes from waiting for other ranks: it may be what another one did."""
    for one in _causes(error):
        if isinstance(one, RuntimeError) and any(word in str(one) for word in _LOST):
            return True
        if any(_calls(frame, waits_in) for frame in _inwards(one.__traceback__)):
            return True
    return False


def raised_text(error: BaseException) -> str:
    """Return the type and the text of an error, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def traceback_text(error: BaseException) -> str:
    """Return the traceback of what caused an error."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = "".join(traceback.format_exception(cause, chain=False)).splitlines()
    return "\n".join(line for line in lines if line.strip("^~ "))


def _waits(frame: FrameType, waits_in: Sequence[object]) -> bool:
    return frame.f_code.co_name == _DEVICE_WAITS or _calls(frame, waits_in)


def _calls(frame: FrameType, objects: Sequence[object]) -> bool:
    if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed."):
        return True
    own = frame.f_locals.get("self")
    return own is not None and any(own is one for one in objects)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inwards(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _causes(error: BaseException | None) -> list[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen
