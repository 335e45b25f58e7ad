"""Digest of what a model's keys and values depend on, for stores that outlive an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from uuid import uuid4

from slotline.planner.plan import Planned

SAMPLES, SAMPLE_BYTES = 32, 4096
"""Places of a large file that are read, and bytes at each. Training changes all of them."""


def fingerprint(planned: Planned) -> str:
    """Return a digest of the model's files and of the settings that change its keys, [16] hexadecimal digits.

    It is the same on all machines. Of large files it covers the size and samples of their content. Two engines have
    different digests if the scales of their caches are calculated from their own first step.
    """
    weights, digest = planned.loaded.config.weights, hashlib.sha256()
    digest.update(repr((planned.loaded.config.load.format, weights.quantize, weights.activation)).encode())
    path = planned.facts.path
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    for file in files:
        if file.is_file():
            digest.update(file.name.encode())
            _add(file, digest)
    if any(group.kv_scales == "calculate" for group in planned.plan.groups):
        digest.update(uuid4().bytes)
    return digest.hexdigest()[:16]


def _add(file: Path, digest: hashlib._Hash) -> None:
    """Add size and content of a file to a digest, samples of it if it is large."""
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(opened.read())
            return
        for number in range(SAMPLES):
            opened.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
