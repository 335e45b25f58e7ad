"""The torch backend, if it returned no log-sum-exp."""

from __future__ import annotations

from attrs import evolve

from slotline.backends.torch_sdpa import descriptor as torch_descriptor
from slotline.registry.capability import Flag

descriptor = evolve(
    torch_descriptor, name="without_lse", capabilities=evolve(torch_descriptor.capabilities, lse=Flag(False))
)
