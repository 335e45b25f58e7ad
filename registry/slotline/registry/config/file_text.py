"""Text of one configuration file. Anything but text of a reasonable size is refused before it is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_BYTES = 2**20
"""A larger file is no configuration that a person wrote."""

_SHELL_PIPES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
"""Where the shell puts what a command in `<(...)` prints, and standard input."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnreadableError(Exception):
    """Reason why a file cannot be read as text, with the line of the first bad byte, or 0."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def is_shell_pipe(path: Path) -> bool:
    """Return True if a path is standard input or a pipe of the shell, whose folder has no meaning."""
    return os.fspath(path).startswith(_SHELL_PIPES)


def read_text(path: Path) -> str:
    """Return the text of a regular file, or of a pipe that the shell opened.

    Raises:
        UnreadableError: if the file is missing, not a regular file, too large, or not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode) and not (stat.S_ISFIFO(kind.st_mode) and is_shell_pipe(path)):
                raise UnreadableError(f"{path} is {_name(kind.st_mode)}, not a file")
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableError(f"there is no file {path}") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise UnreadableError(f"{os.fspath(path)!r} is no name of a file: {error}") from error
    if len(content) > MAX_BYTES:
        raise UnreadableError(f"{path} is larger than {MAX_BYTES:,} bytes, the most that a configuration may have")
    return _decoded(content)


def _open(path: str, flags: int) -> int:
    """Open without waiting for the other end of a named pipe."""
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if hasattr(os, "set_blocking") and is_shell_pipe(Path(path)):
        os.set_blocking(fd, True)
    return fd


def _name(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        hint = ", but UTF-16" if wide else ""
        place = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        reason = f"cannot be read: it is not UTF-8 ({place}){hint}: save it as UTF-8"
        raise UnreadableError(reason, line) from error
