"""Short timing of linear plugins on this machine, kept in the cache folder by machine, scheme and size."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from slotline.registry.cache_folder import cache_folder, write_atomic
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.discovery import PluginRegistry
from slotline.registry.negotiation import Candidate

logger = logging.getLogger("slotline")

_ELEMENTS = 1 << 22
"""Elements of the weight that is timed. A product with more outputs takes proportionally longer."""
_SECONDS = 0.02
"""Time for one candidate and number of tokens, apart from packing."""
PROMPT = 64
"""Tokens of a step with a prompt."""


def product_times(
    registry: PluginRegistry, fits: Sequence[Candidate], context_of: Callable[[Any], Any], info: DeviceInfo
) -> dict[str, tuple[float, float]]:
    """Return microseconds of a product of one token, and a token's share of one of `PROMPT` tokens, by name.

    Their sum weighs a token that is read like one that is generated.
    """
    times: dict[str, tuple[float, float]] = {}
    for candidate in fits:
        assert candidate.descriptor is not None  # it fits
        context: LinearContext = context_of(candidate.descriptor)
        key = _key(candidate, context, info)
        kept = _kept(key)
        if kept is None:
            kept = _timed(registry.build(candidate.descriptor, context), context)
            _keep(key, kept)
        times[candidate.name] = kept
    return times


def random_weight(scheme: WeightScheme, out_features: int, in_features: int, seed: int = 0) -> QuantizedWeight:
    """Return a random weight of a scheme, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    element = scheme.element
    shape = (out_features, in_features)
    if element.codes.startswith("float8"):
        codes = torch.randn(shape, generator=generator).to(getattr(torch, element.codes))
    else:
        dtype = getattr(torch, element.codes)
        codes = torch.randint(element.low, element.high + 1, shape, generator=generator, dtype=dtype)
    sizes = scheme.scale_shape(*shape)
    scales = torch.rand(sizes, generator=generator) * 0.02 + 0.001
    if scheme.name == "mxfp4":
        scales = torch.exp2(torch.randint(-8, -4, sizes, generator=generator).float())
    offsets = None if scheme.symmetric else torch.randn(sizes, generator=generator) * 0.01
    order = None
    if scheme.act_order:
        order = (torch.arange(in_features) % sizes[1])[torch.randperm(in_features, generator=generator)].int()
    static = scheme.activation and not scheme.dynamic
    return QuantizedWeight(
        scheme=scheme,
        codes=codes,
        scales=scales,
        offsets=offsets,
        g_idx=order,
        input_scale=torch.tensor(0.05) if static else None,
    )


def _timed(kernel: Any, context: LinearContext) -> tuple[float, float]:
    outputs = max(1, min(context.out_features, _ELEMENTS // context.in_features))
    block = context.scheme.group[0]
    outputs = max(outputs // block, 1) * block if 1 < block <= context.out_features else outputs
    with torch.inference_mode():
        packed = kernel.pack(random_weight(context.scheme, outputs, context.in_features))
        whole = 1e6 * context.out_features / outputs
        single, prompt = (_best_of(kernel, packed, context, outputs, tokens) for tokens in (1, PROMPT))
    return single * whole, prompt * whole / PROMPT


def _best_of(kernel: Any, packed: Any, context: LinearContext, outputs: int, tokens: int) -> float:
    """Return the seconds of the fastest of several products."""
    x = torch.randn(tokens, context.in_features).to(getattr(torch, context.dtype))
    kernel.apply(x, packed, outputs)
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends:
        started = time.perf_counter()
        kernel.apply(x, packed, outputs)
        best = min(best, time.perf_counter() - started)
    return best


def _key(candidate: Candidate, context: LinearContext, info: DeviceInfo) -> str:
    facts = {
        "device": info.name or info.type,
        "features": sorted(info.features),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "plugin": [candidate.name, candidate.distribution, candidate.version],
        "scheme": repr(context.scheme),
        "size": [context.in_features, context.out_features],
        "dtype": context.dtype,
        "options": repr(context.options),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _kept(key: str) -> tuple[float, float] | None:
    with suppress(OSError, ValueError, TypeError):
        single, prompt = json.loads((cache_folder() / "products" / f"{key}.json").read_text())["us"]
        return float(single), float(prompt)
    return None


def _keep(key: str, us: tuple[float, float]) -> None:
    try:
        write_atomic(cache_folder() / "products" / f"{key}.json", json.dumps({"us": us}).encode())
    except OSError as error:  # a folder that cannot be written costs the next start a timing
        logger.debug("the time of a product is not kept: %s", error)
