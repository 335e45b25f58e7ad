"""Whether Triton's kernels can run: the package, and the C compiler that makes what launches them."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec
from shutil import which

logger = logging.getLogger("slotline")


@cache
def has_triton() -> bool:
    """Whether Triton's kernels serve what lies on a GPU; a warning says why where torch's operations do."""
    reason = why_no_triton()
    if reason is not None:
        logger.warning("torch's operations do the work of Triton's kernels on this GPU, and take longer: %s", reason)
    return reason is None


def why_no_triton() -> str | None:
    """Why Triton's kernels cannot run on a GPU here, and what helps; None where they can.

    The compiler is looked for where Triton looks (`triton.runtime.build`).
    """
    if find_spec("triton") is None:
        return "the package triton is not installed; `pip install triton` makes it available"
    named = os.environ.get("CC")
    if (which(named) if named is not None else which("gcc") or which("clang")) or _builds_otherwise():
        return None
    where = "gcc or clang" if named is None else f"{named!r}, which CC names"
    return (
        f"triton compiles a launcher for each of its kernels and finds no C compiler: {where}; install one, or name it "
        "in the environment variable CC"
    )


def _builds_otherwise() -> bool:
    from triton import knobs

    return knobs.build.impl is not None
