"""Descriptor of the `flashinfer` attention backend: FlashInfer's paged kernels, planned on the host for each step."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from shutil import which
from typing import Any, Literal

from attrs import frozen

from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Choice, Flag, GraphSupport, Level, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

HALVES = ("bfloat16", "float16")
CUDA = Path("/usr/local/cuda")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")


@frozen(kw_only=True)
class FlashInferOptions:
    """`[backend.flashinfer]`.

    Attributes:
        prefill: kernels of batches with several query tokens per request. `fa2` runs everywhere. `fa3` needs Hopper and
            is faster for long queries, but reads no eight-bit cache. `auto` takes `fa3` for long queries if it runs.
    """

    prefill: Literal["auto", "fa2", "fa3"] = "auto"


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package, a compiler for its kernels or their compiled form, and Triton are installed."""
    if device.type != "cuda":
        return descriptor.capabilities  # negotiation says that the device is the reason, and no package helps
    if reason := why_no_triton():
        return reason
    if find_spec("flashinfer") is None:
        return "the package flashinfer is not installed; `pip install flashinfer-python` makes this backend available"
    if find_spec("flashinfer_jit_cache") is None and (missing := _missing_tool()):
        return (
            f"flashinfer compiles its kernels when they are first needed and finds no {missing}; install the CUDA "
            "toolkit and ninja, or the package flashinfer-jit-cache with compiled kernels"
        )
    return descriptor.capabilities


def _missing_tool() -> str | None:
    """Return a tool that FlashInfer's compiler needs and this machine lacks, searched like FlashInfer does."""
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    if which("nvcc") is None and not any((home / "bin" / "nvcc").exists() for home in (*homes, CUDA)):
        return "nvcc"
    return None if which("ninja") or find_spec("ninja") else "ninja"


descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="flashinfer",
    capabilities=AttentionCapabilities(
        devices=Set(("cuda",)),
        min_compute_capability=(8, 0),
        dtypes=Set((*((name, name) for name in HALVES), *product(HALVES, EIGHT_BITS))),
        head_sizes=Range(minimum=64, maximum=64, extra=(128, 256)),
        layouts=Choice(("NHD", "HND")),
        sliding_window=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True, "applied to the output by the log-sum-exp"),
        # A captured prefill plan takes its tile from the most tokens that one request could have, not from what each
        # has: verifying 4 drafts of 256 requests would compute tiles of 128 rows for 5. Such batches run eagerly.
        graphs=Level(GraphSupport.SINGLE_TOKEN),
        cascade=Flag(True),
        lse=Flag(True, "base 2; a sink counts as one more key"),
        lse_base="2",
        lowest_score=-5e4,  # what FlashInfer's kernels have in place of minus infinity
        priority=15,
        priority_reason="the suite has passed on a GPU up to L4; its kernels are compiled when they are first needed",
    ),
    factory="slotline.backends.flashinfer.backend:FlashInferBackend",
    options=FlashInferOptions,
    probe="slotline.backends.flashinfer:probe",
    summary="FlashInfer's paged kernels: tensor-core decode in graphs, fa2 or fa3 for longer queries",
)
