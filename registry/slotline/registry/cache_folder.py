"""Location of the on-disk cache for tuning results and compiled kernels, and atomic writes to it."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path
from threading import get_ident

import psutil

_SCRATCH = re.compile(r"\.scratch-(?P<place>\w+)-(?P<pid>\d+)-\d+$")
_EARLIER = re.compile(r"\.(?P<pid>\d+)\.\d+$")
"""Scratch files as earlier versions named them: without the place where the number counts."""
_CHECKSUM = hashlib.sha256
_CHECKSUM_SIZE = _CHECKSUM().digest_size
_SETTLED_S = 3600.0
_FOREIGN_S = 24 * 3600.0
"""Age from which a scratch file counts as left over if its process cannot be asked."""


def cache_folder() -> Path:
    """Return ``SLOTLINE_CACHE``, or ``slotline`` in the folder for caches of the XDG base directory specification.

    Raises:
        OSError: if the folder depends on a home folder and the user has none.
    """
    try:
        if named := os.environ.get("SLOTLINE_CACHE"):
            return Path(named).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "slotline"
    except RuntimeError as error:  # HOME is not set, and the user is unknown
        raise OSError(errno.ENOENT, str(error)) from error


def write_atomic(file: Path, content: bytes) -> None:
    """Write a file of that folder atomically, so that no reader finds a part of it.

    Scratch files of killed processes in the same folder are removed.

    Raises:
        OSError: if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(file.parent)
    scratch = file.with_name(f"{file.name}.scratch-{_place()}-{os.getpid()}-{get_ident()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(file)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def read_checked(file: Path) -> bytes | None:
    """Return the data that `write_checked` wrote into a file, or None if the file is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, data = content[:_CHECKSUM_SIZE], content[_CHECKSUM_SIZE:]
    return data if _CHECKSUM(data).digest() == checksum else None


def write_checked(file: Path, data: bytes) -> None:
    """Write a file that begins with a checksum of its data, see `write_atomic`.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(file, _CHECKSUM(data).digest() + data)


def write_first(file: Path, content: bytes) -> None:
    """Write a file of that folder unless another process was first, atomically.

    Raises:
        OSError: if it cannot be written.
    """
    own = file.with_name(f"{file.stem}.{os.getpid()}")
    write_atomic(own, content)
    try:
        with suppress(FileExistsError):
            os.link(own, file)
    except OSError:  # a file system without links
        if not file.exists():
            own.replace(file)
    finally:
        own.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove the scratch files of a folder whose processes have ended.

    A file of this machine is removed once its process has ended. Processes of another machine or container that shares
    the folder cannot be checked, so their files are removed after a day.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False) and _is_stale(entry.name, entry.stat().st_mtime):
                    os.unlink(entry.path)


def _is_stale(name: str, modified: float) -> bool:
    age = time.time() - modified
    if found := _SCRATCH.search(name):
        if found["place"] == _place():
            return not psutil.pid_exists(int(found["pid"]))
        return age > _FOREIGN_S
    if found := _EARLIER.search(name):
        return age > _SETTLED_S and not psutil.pid_exists(int(found["pid"]))
    return False


def _place() -> str:
    """Return a name for the scope of process numbers: the machine since its start, and the namespace."""
    facts = [platform.node()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            facts.append(os.readlink(file) if file.endswith("pid") else Path(file).read_text())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
