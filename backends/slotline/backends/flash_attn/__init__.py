"""Descriptors of the attention backends `flash_attn` and `flash_attn_3`: FlashAttention 2 and 3 over a paged cache."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slotline.backends.keys_ahead import KEYS_AHEAD, LIMITS
from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Range, Set, Support
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package is installed, and Triton, whose kernel writes the cache."""
    if device.type != "cuda":
        return descriptor.capabilities
    if reason := why_no_triton():
        return reason
    if find_spec("flash_attn") is None:
        return "the package flash_attn is not installed; `pip install flash-attn` makes this backend available"
    return descriptor.capabilities


def probe_3(device: DeviceInfo) -> Any:
    """Return the offer, if the package and Triton are installed. Its kernels run only on Hopper."""
    if device.type != "cuda":
        return descriptor_3.capabilities
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return f"FlashAttention 3 runs on Hopper (compute capability 9.0), this is {device.name}"
    if reason := why_no_triton():
        return reason
    return _why_no_interface() or descriptor_3.capabilities


def _why_no_interface() -> str | None:
    """Return the reason why FlashAttention 3's module cannot be used, and a fix. None if it can.

    FlashAttention 2 has a file of that name in its package, which is found if that folder itself is on the path.
    """
    spec = find_spec("flash_attn_interface")
    if spec is None or spec.origin is None:
        return (
            "the package flash_attn_interface is not installed; build it from the folder hopper of flash-attention's "
            "sources"
        )
    folder = Path(spec.origin).parent
    if folder.name == "flash_attn" and (folder / "__init__.py").exists():
        return (
            f"flash_attn_interface is {spec.origin} here, a file of FlashAttention 2's package and not "
            "FlashAttention 3; take that folder off Python's path (PYTHONPATH, or the folder of the script that runs), "
            "and if flash_attn_interface is missing then, build it from the folder hopper of flash-attention's sources"
        )
    return None


descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="flash_attn",
    capabilities=AttentionCapabilities(
        devices=Set(("cuda",)),
        min_compute_capability=(8, 0),
        dtypes=Set((("bfloat16", "bfloat16"), ("float16", "float16"))),
        head_sizes=Range(minimum=8, maximum=256, step=8),
        kernel_block_sizes=Align(multiple_of=256),
        layouts=Choice(("NHD", "HND")),
        sliding_window=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True, "applied to the output by the log-sum-exp"),
        alibi=Flag(True),
        keys_ahead=KEYS_AHEAD,
        # Query lengths are an argument of the launch, so that only batches of equal ones can be replayed.
        graphs=Level(GraphSupport.UNIFORM),
        lse=Flag(True, "natural log; a sink counts as one more key"),
        bounded_lengths=True,
        limits=(
            *LIMITS,
            Limit(
                when="alibi",
                capability="sliding_window",
                offer=Flag(Support.NOT_IMPLEMENTED),
                note="the library counts distances from another place then",
            ),
        ),
        priority=20,
        priority_reason="the suite has passed on a GPU",
    ),
    factory="slotline.backends.flash_attn.backend:build",
    probe="slotline.backends.flash_attn:probe",
    summary="FlashAttention 2 with split keys, pages of a multiple of 256 tokens",
)

descriptor_3 = Descriptor(
    kind=Kind.ATTENTION,
    name="flash_attn_3",
    capabilities=AttentionCapabilities(
        devices=Set(("cuda",)),
        min_compute_capability=(9, 0),
        dtypes=Set((("bfloat16", "bfloat16"), ("float16", "float16"))),
        head_sizes=Range(minimum=8, maximum=256, step=8),
        layouts=Choice(("NHD", "HND")),
        sliding_window=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True, "applied to the output by the log-sum-exp"),
        lse=Flag(True, "natural log; a sink counts as one more key"),
        priority=1,
        priority_reason="no machine that has the package has run it yet, and no capture is claimed before",
    ),
    factory="slotline.backends.flash_attn.hopper:FlashAttn3Backend",
    probe="slotline.backends.flash_attn:probe_3",
    summary="FlashAttention 3 on Hopper, pages of any size; not run yet",
)
