"""The processor's name, read without torch."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """Return the processor's model as the system names it, or its architecture if the system does not."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
