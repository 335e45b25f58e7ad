"""The process of a command: its standard streams, interrupts at any time, and the remaining output at the end.

It imports next to nothing, so that an interrupt is understood from the first moment on.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the built-in part of `signal`
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from sys import UnraisableHookArgs
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130
"""128 and the number of SIGINT, as shells report it."""
ERROR = 2

_DELIVER_AGAIN_S = 0.05


def run_process(command: Callable[[Interrupts], int]) -> int:
    """Run a command as the whole of this process.

    Args:
        command: does the work and returns the exit code. It starts the interrupts that it is given once its modules are
            imported. Before that an interrupt ends the process at once, since there is nothing to clean up.

    Returns:
        The exit code.
    """
    interrupts = Interrupts()
    interrupts.end_at_once()
    if not _open_streams():
        _say("error: standard output is closed\n  fix: send it to /dev/null if the output is not wanted")
        return ERROR
    try:
        code = _code(command, interrupts)
    except BrokenPipeError:
        code = closed_by_reader()
    except OSError as error:  # standard error, or the stream of the help text, cannot be written
        _say(f"error: {error}")
        code = ERROR
    except BaseException:
        if not interrupts.seen:
            raise
        code = ERROR  # any exception may follow an interrupt in the middle of a library
    interrupts.end_at_once()
    if interrupts.seen and code != INTERRUPTED:
        _say("interrupted")
        code = INTERRUPTED
    return max(code, _flush(sys.stdout), _flush(sys.stderr))


def end_without_collections() -> None:
    """Let a command and Python end without looking for garbage among all objects four times, over a second in all.

    What is registered for the end still runs, and objects outside of cycles are still freed. Triton's bindings report
    what is not freed as leaks, so after it was imported the end is an ordinary one.
    """
    if "triton._C.libtriton" not in sys.modules:
        import gc

        gc.freeze()


def closed_by_reader() -> int:
    """Drop the output that is still to be printed, since its reader has closed. Return the exit code."""
    return max(_flush(sys.stdout), _flush(sys.stderr))


def _code(command: Callable[[Interrupts], int], interrupts: Interrupts) -> int:
    try:
        return command(interrupts)
    except SystemExit as stop:  # of argparse
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


class Interrupts:
    """SIGINT: first the end, then a KeyboardInterrupt, and the end again when the command is over.

    A process that ignores SIGINT goes on ignoring it.

    Attributes:
        seen: whether an interrupt came while the command ran. A library may turn it into another error, or lose it.
    """

    def __init__(self) -> None:
        self.seen = False
        self._ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler

    def end_at_once(self) -> None:
        """End the process on an interrupt from now on."""
        self._take(_end)

    def start(self) -> None:
        """Raise KeyboardInterrupt in the command on an interrupt from now on."""
        self._take(self._raise)
        if self._ours:
            sys.unraisablehook = self._unraisable

    def _take(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        if self._ours:
            _signal.signal(_signal.SIGINT, handler)

    def _raise(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self.seen = True
        raise KeyboardInterrupt

    def _unraisable(self, event: UnraisableHookArgs) -> None:
        """Deliver an interrupt again that came in a finalizer, which no exception can leave."""
        if not issubclass(event.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(event)
            return
        from _thread import interrupt_main
        from threading import Timer

        again = Timer(_DELIVER_AGAIN_S, interrupt_main)
        again.daemon = True
        again.start()


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    _say("interrupted")
    os._exit(INTERRUPTED)


def _open_streams() -> bool:
    """Put /dev/null in place of a closed standard stream, so that no file gets its number.

    Returns whether output is open.

    `print` to a standard error that is None goes to standard output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return False
    if getattr(sys.stdout, "errors", "") == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return True


def _flush(stream: Any) -> int:
    """Write the remaining output. Return the exit code of that.

    A write that fails now would fail again at the very end.
    """
    try:
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except (OSError, ValueError) as error:
        _discard(stream)
        _say(f"error: {error}")
        return ERROR
    return 0


def _discard(stream: Any) -> None:
    """Point a stream that has a file at /dev/null."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, number)
    os.close(opened)


def _say(text: str) -> None:
    """Write a line to standard error, if that is possible."""
    try:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:
        return
