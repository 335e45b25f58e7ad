"""Support check for Triton's kernels: the package, the C compiler for its launchers, and a writable folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory, TemporaryFile

from slotline.kernels.kernel_files import kernel_folder

logger = logging.getLogger("slotline")

FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Triton reads this for each kernel: whether a product and a sum become one instruction. Up to 3.9 they do by default,
and our kernels' speed and bits depend on it. From 3.10 on they do not, which 3.9 warns of."""


@cache
def has_triton() -> bool:
    """Return True if Triton's kernels are used on a GPU.

    Otherwise a warning gives the reason for using torch's operations.
    """
    reason = why_no_triton()
    if reason is not None:
        logger.warning("torch's operations do the work of Triton's kernels on this GPU, and take longer: %s", reason)
    return reason is None


def why_no_triton() -> str | None:
    """Return the reason why Triton's kernels cannot run on a GPU here, and a fix. None if they can.

    The compiler is searched like in Triton (`triton.runtime.build`). If Triton's own folder cannot be written, it gets
    another one. Products and sums stay fused (`FUSION`).
    """
    if find_spec("triton") is None:
        return "the package triton is not installed; `pip install triton` makes it available"
    os.environ.setdefault(FUSION, "1")
    named = os.environ.get("CC")
    if (which(named) if named is not None else which("gcc") or which("clang")) or _builds_otherwise():
        return _why_no_folder()
    where = "gcc or clang" if named is None else f"{named!r}, which CC names"
    return (
        f"triton compiles a launcher for each of its kernels and finds no C compiler: {where}; install one, or name it "
        "in the environment variable CC"
    )


@cache
def _why_no_folder() -> str | None:
    """Give Triton another folder if its own cannot be written, and return the reason if there is none.

    Triton fails if it cannot write a file. A folder set by the user is kept, because it may already contain every
    kernel.
    """
    if os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"):
        return None
    from triton import knobs

    own = Path(knobs.cache.dir)
    if (reason := _why_not_written(own)) is None:
        return None
    try:
        folder = _other_folder()
    except OSError as error:
        return f"triton writes what it compiles to {own} ({reason}), and there is no other folder: {error}"
    os.environ["TRITON_CACHE_DIR"] = str(folder)  # read by triton in each compilation, and by processes of this one
    logger.warning("triton's kernels are kept in %s, since %s cannot be written: %s", folder, own, reason)
    return None


def _other_folder() -> Path:
    """Return a folder that can be written: in the cache folder, or one that goes with the process."""
    with suppress(OSError):
        if _why_not_written(folder := kernel_folder() / "triton") is None:
            return folder
    return Path(_temporary().name)


def _why_not_written(folder: Path) -> str | None:
    if not folder.is_absolute():
        return "there is no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@cache
def _temporary() -> TemporaryDirectory[str]:
    """Make a folder that goes with the process."""
    return TemporaryDirectory(prefix="slotline-triton-")


def _builds_otherwise() -> bool:
    from triton import knobs

    return knobs.build.impl is not None
