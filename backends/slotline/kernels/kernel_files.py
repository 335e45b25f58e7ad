"""Files of compiled kernels in the cache folder: read at a start, written once, and never needed.

Machine code that was damaged on disk would crash the process or give wrong numbers, so each file begins with a checksum
of the rest. Where nothing can be written, kernels are compiled in each start, and one warning says so.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from slotline.registry.cache_folder import cache_folder, read_checked, write_checked

logger = logging.getLogger("slotline")


def kernel_folder() -> Path:
    """Return the folder for kernels below the cache folder.

    Raises:
        OSError: if there is no cache folder, see `cache_folder`.
    """
    return cache_folder() / "kernels"


def read_kernel(name: str, folder: Path | None = None) -> bytes | None:
    """Return the data that `write_kernel` stored under a name, or None if the file is missing or damaged."""
    try:
        folder = folder or kernel_folder()
    except OSError:
        return None
    return read_checked(folder / name)


def write_kernel(name: str, kernel: bytes, folder: Path | None = None) -> None:
    """Keep a compiled kernel for the next start, or warn once that nothing can be kept."""
    try:
        folder = folder or kernel_folder()
        write_checked(folder / name, kernel)
    except OSError as error:
        _warn_not_kept(folder, error.strerror or str(error))


@cache
def _warn_not_kept(folder: Path | None, reason: str) -> None:
    where = "" if folder is None else f" in {folder}"
    logger.warning(
        "compiled kernels are not kept for the next start%s: %s; set SLOTLINE_CACHE to a folder that can be written",
        where,
        reason,
    )
