"""What a vLLM attention backend declares, as capabilities of contract 1.

Most of it is declared by methods of the class. vLLM has no method for soft caps and ALiBi: an implementation whose
constructor takes them supports them, as in vLLM itself, and the probe asks it. Features that vLLM's interface has and
the bridge does not carry (trees, prefixes read once, captured graphs, latents, encoders' keys) are not declared, so
that their checks are skipped.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from attrs import evolve

from slotline.bridges.vllm.pages import FORMAT, OpaquePages
from slotline.registry.capability import Align, Choice, Flag, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities, AttentionContext, AttentionLayer
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.errors import PluginLoadError
from slotline.registry.loading import one_line

CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's names of eight-bit caches that hold ``x / scale``, and the dtypes that they stand for."""
LARGEST_HEAD = 1024
"""Head sizes up to here are asked for, since a class may say which it supports by a method only."""
USUAL_HEADS = (64, 128, 96, 80, 256, 32)


def describe(backend: Any, text: str) -> tuple[Descriptor[Any], Descriptor[Any]]:
    """Return the descriptors of a vLLM backend and of its cache, see `slotline.bridges.vllm.conform.bridge`."""
    from slotline.bridges.vllm.adapter import VllmAttention

    attention = Descriptor(
        kind=Kind.ATTENTION,
        name=f"vllm_{backend.__name__}",
        capabilities=declared(backend),
        factory=partial(VllmAttention, backend),
        probe=partial(probe, backend),
        summary=f"vLLM's interface: {text}",
    )
    pages = Descriptor(
        kind=Kind.KV_SPEC,
        name=f"vllm_{backend.__name__}",
        capabilities=KVSpecCapabilities(
            kv_kinds=Set(("full", "sliding")),
            exact_kinds=Set(("full",)),
            page_stride=Flag(True),
            formats=Set((FORMAT,)),
        ),
        factory=partial(OpaquePages, backend),
        summary=f"the pages of {text}",
    )
    return attention, pages


def declared(backend: Any) -> AttentionCapabilities:
    """Return the offer of a class, of which a machine and a constructor may take away some."""
    from vllm.platforms import current_platform

    return AttentionCapabilities(
        devices=Set((current_platform.device_type,)),
        dtypes=Set(dtype_pairs(backend)),
        head_sizes=_head_sizes(backend),
        kernel_block_sizes=_block_sizes(backend),
        layouts=_layouts(backend),
        attention_types=Set([kind for kind in ("decoder", "encoder_only") if _asked(backend, "attn_type", kind)]),
        sliding_window=Flag(_asked(backend, "sliding_window")),
        sinks=Flag(_asked(backend, "sink")),
        soft_cap=Flag(True),
        alibi=Flag(True),
        kv_scales=Flag(any(dtype != cache for dtype, cache in dtype_pairs(backend))),
        cache_formats=Set((FORMAT,)),
        writes_cache=bool(getattr(backend, "forward_includes_kv_cache_update", True)),
    )


def _asked(backend: Any, feature: str, *arguments: str) -> bool:
    """Return what the class's method ``supports_...`` says. A class without it may be older than the method: True."""
    method = getattr(backend, f"supports_{feature}", None)
    return True if method is None else bool(method(*arguments))


def dtype_pairs(backend: Any) -> list[tuple[str, str]]:
    """Return pairs of an activation dtype and a cache dtype, by name."""
    plain = [str(dtype).removeprefix("torch.") for dtype in backend.supported_dtypes]
    caches = dict.fromkeys(getattr(backend, "supported_kv_cache_dtypes", None) or ("auto",))
    found = [(dtype, dtype) for dtype in plain if "auto" in caches or dtype in caches]
    return found + [(dtype, CACHE_DTYPES[cache]) for cache in caches if cache in CACHE_DTYPES for dtype in plain]


def _head_sizes(backend: Any) -> Range:
    if not hasattr(backend, "supports_head_size"):
        sizes = tuple(backend.get_supported_head_sizes())
        return Range(sizes[0], sizes[0], extra=sizes[1:]) if sizes else Range()
    sizes = tuple(size for size in range(1, LARGEST_HEAD + 1) if backend.supports_head_size(size))
    if not sizes:
        raise PluginLoadError(f"{backend.__name__} supports no head size", fix="correct get_supported_head_sizes")
    if len(sizes) == LARGEST_HEAD:
        return Range()
    step = min((b - a for a, b in itertools.pairwise(sizes)), default=1)
    if len(sizes) > 2 and sizes == tuple(range(sizes[0], sizes[-1] + 1, step)) and sizes[0] % step == 0:
        return Range(sizes[0], sizes[-1], step)
    return Range(sizes[0], sizes[0], extra=sizes[1:])


def _block_sizes(backend: Any) -> Align:
    sizes = list(backend.get_supported_kernel_block_sizes())
    exact = tuple(size for size in sizes if isinstance(size, int))
    bases = [size.base for size in sizes if not isinstance(size, int)]
    return Align(exact=exact, multiple_of=min(bases, default=None))


def _layouts(backend: Any) -> Choice:
    """Return the orders inside a page that the class can read, from vLLM's orders of layers, blocks, heads, tokens.

    Raises:
        PluginLoadError: if in all of them blocks are not whole.
    """
    if hasattr(backend, "get_kv_cache_shape"):
        return Choice(("NHD",))  # the order is the class's own
    layouts = getattr(backend, "supported_kv_cache_layouts", lambda: None)()
    if layouts is None:
        return Choice(("NHD", "HND"))
    orders = {"LBNHC": "NHD", "BLNHC": "NHD", "LBHNC": "HND", "BLHNC": "HND"}
    found = tuple(dict.fromkeys(orders[layout.name] for layout in layouts if layout.name in orders))
    if not found:
        raise PluginLoadError(
            f"{backend.__name__} reads only the layouts {', '.join(layout.name for layout in layouts)}",
            fix=f"the bridge lays out {', '.join(orders)}",
        )
    return Choice(found)


def probe(backend: Any, _device: DeviceInfo) -> AttentionCapabilities | str:
    """Return what the class's constructors accept of its offer, or the reason why they accept nothing."""
    offer = declared(backend)
    pairs, reason = [], ""
    for pair in dtype_pairs(backend):
        refused = _refused(backend, offer, pair)
        if refused is None:
            pairs.append(pair)
        reason = reason or refused or ""
    if not pairs:
        return reason
    soft_cap = _refused(backend, offer, pairs[0], soft_cap=30.0)
    alibi = _refused(backend, offer, pairs[0], alibi_slopes=(0.5, 0.25))
    return evolve(
        offer,
        dtypes=Set(pairs),
        kv_scales=Flag(any(dtype != cache for dtype, cache in pairs)),
        soft_cap=Flag(soft_cap is None),
        alibi=Flag(alibi is None),
    )


def _refused(backend: Any, offer: AttentionCapabilities, pair: tuple[str, str], **fields: Any) -> str | None:
    """Return why the class's constructors refuse a layer, None if they accept it."""
    from slotline.bridges.vllm.adapter import VllmAttention

    head = next((size for size in USUAL_HEADS if offer.head_sizes.refusal(size) is None), offer.head_sizes.minimum)
    layer = AttentionLayer(
        name="model.layers.0.self_attn.attn",
        index=0,
        num_heads=2,
        num_kv_heads=1,
        head_size=head,
        head_size_v=head,
        scale=head**-0.5,
        **fields,
    )
    size = next((n for n in (16, 32, 64, 128, 256) if offer.kernel_block_sizes.refusal(n) is None), 1)
    context = AttentionContext(
        contract=1,
        layers=(layer,),
        device=next(iter(offer.devices.values or ("cpu",))),
        dtype=pair[0],
        kv_dtype=pair[1],
        block_size=size,
        kernel_block_size=size,
        layout=offer.layouts.options[0],
        max_query_len=64,
        max_requests=4,
        max_tokens=64,
        max_model_len=256,
        cache_format=FORMAT,
    )
    try:
        VllmAttention(backend, context)
    except Exception as error:  # whatever a constructor raises is its refusal
        return one_line(error)
    return None
