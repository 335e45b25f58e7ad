"""Where what costs time to find out or to compile is kept for the next start."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from threading import get_ident


def cache_folder() -> Path:
    """Return ``SLOTLINE_CACHE``, or ``slotline`` in the folder for caches of the XDG base directory specification.

    Raises:
        OSError: if the folder hangs on a home folder and the user has none.
    """
    try:
        if named := os.environ.get("SLOTLINE_CACHE"):
            return Path(named).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "slotline"
    except RuntimeError as error:  # HOME is not set, and the system knows no such user
        raise OSError(errno.ENOENT, str(error)) from error


def keep(file: Path, content: bytes) -> None:
    """Write a file of that folder at once, so that no reader finds half of it.

    Raises:
        OSError: if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}.{get_ident()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(file)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise
