"""The attention backend `triton`, declared for the CPU, where Triton's interpreter runs its kernels.

The interpreter computes in numpy, which has no bfloat16.
"""

from __future__ import annotations

from attrs import evolve

from slotline.backends.triton import descriptor as triton
from slotline.registry.capability import Set

KNOWN = ("float32", "float16")

descriptor = evolve(
    triton,
    name="interpreted_triton",
    capabilities=evolve(
        triton.capabilities,
        devices=Set(("cpu",)),
        dtypes=Set(pair for pair in triton.capabilities.dtypes.values or () if pair[0] in KNOWN),
        min_compute_capability=None,
    ),
    probe=None,
)
