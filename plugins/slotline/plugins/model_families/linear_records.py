"""Kept times of products on a CPU, which `slotline explain` shows. Read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from slotline.registry import hookimpl
from slotline.registry.cache_folder import cache_folder
from slotline.registry.processor import processor

CLASSES = (1, 4, 16, 128)
"""Numbers of rows that are timed: each stands for those down to the one before, and the last for more."""
LAYOUTS = {"onednn": ("onednn", "panels"), "plain": ("torch", "numba")}
"""Kernels of each layout. ``panels`` and ``numba`` are ours, for few rows."""
RULE = 2
"""Number of the rule that chooses and of its kernels: a change makes earlier answers void."""
FOLDER = f"cpu-linear-{RULE}"
"""In the cache folder."""


@frozen(kw_only=True)
class Record:
    """Times of one shape and what was chosen.

    Attributes:
        processor, torch, dtype, threads, shape: what they hold for; shape is [out_features, in_features].
        layout: ``onednn`` or ``plain``.
        kernels: of the layout, for each of `CLASSES`.
        reason: in words.
        microseconds: of a call of each candidate for each of `CLASSES`, None where it has no kernel.
    """

    processor: str
    torch: str
    dtype: str
    threads: int
    shape: Sequence[int]
    layout: str
    kernels: Sequence[str]
    reason: str
    microseconds: Mapping[str, Sequence[float | None]]

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """Return the record in a file, None if there is none that can be read."""
        with suppress(OSError, ValueError, TypeError):
            content: Any = json.loads(file.read_text(encoding="utf-8"))
            record = cls(**{field.name: content[field.name] for field in fields(cls) if field.name in content})
            if set(record.kernels) <= set(LAYOUTS.get(record.layout, ())):
                return record if len(record.kernels) == len(CLASSES) else None
        return None

    def describe(self) -> str:
        """Return a line with the winner, the reason and every candidate's times."""
        shown = "; ".join(
            f"{name} {' '.join('-' if t is None else f'{t:.0f}' for t in found)}"
            for name, found in self.microseconds.items()
        )
        used = f"{self.layout} ({', '.join(self.kernels)})"
        size = f"{self.shape[1]}x{self.shape[0]}"
        return f"linear {size} {self.dtype}, {self.threads} threads: {used}, {self.reason}; us: {shown}"


@hookimpl
def slotline_report_header(config: Any) -> list[str] | None:
    """Return the kept choices of this processor and torch, for a report of a run on a CPU."""
    if config.device not in ("cpu", "auto"):
        return None
    try:
        files = sorted((cache_folder() / FOLDER).glob("*.json"))
    except OSError:
        return None
    own = processor(), version("torch")
    found = [record for record in map(Record.read, files) if record is not None]
    lines = sorted(record.describe() for record in found if (record.processor, record.torch) == own)
    if not lines:
        return None
    rows = ", ".join(str(count) for count in CLASSES)
    return [f"products on {processor()}, times of {rows} rows (in x out features):", *lines]
