"""Check of a cache spec's answers when it is built and bound, because the core relies on them in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

from slotline.registry.contracts import AttentionLayer, CacheTensor, CacheTensors, KVSpec, KVSpecContext


def wrong_answers(spec: KVSpec, context: KVSpecContext) -> Iterator[str]:
    """Yield a sentence for each answer that is not a count or not a list of blocks."""
    longest = context.max_model_len
    calls: list[tuple[str, Any, int]] = [("max_blocks_held()", spec.max_blocks_held(), 0)]
    for tokens in sorted({0, 1, min(context.block_size, longest), longest}):
        calls.append((f"blocks_needed({tokens})", spec.blocks_needed(tokens), 1 if tokens else 0))
        calls.append((f"blocks_freeable({tokens})", spec.blocks_freeable(tokens), 0))
    for call, answer, least in calls:
        if not isinstance(answer, Integral) or isinstance(answer, bool) or answer < least:
            yield f"{call} is {answer!r:.80}, not a number of {least} or more"
    hit = spec.prefix_hit([], _nothing)
    if not isinstance(hit, Sequence) or len(hit) != 0:
        yield f"prefix_hit([], lookup) is {hit!r:.80}, not an empty list"


def wrong_cache(
    cache: Any,
    layer: AttentionLayer,
    num_blocks: int,
    block_size: int,
    dtype: str,
    tensors: Callable[[AttentionLayer], Sequence[CacheTensor]] | None = None,
) -> Iterator[str]:
    """Yield a sentence for each view of a layer's cache, as returned by `bind`, with a wrong shape or dtype.

    Args:
        num_blocks, block_size: in kernel blocks.
        dtype: of the cache, by name.
        tensors: the spec's method of that name. None for keys and values.
    """
    if tensors is not None:
        yield from _wrong_tensors(cache, layer, num_blocks, block_size, tensors(layer))
        return
    for name, size in (("key", layer.head_size), ("value", layer.head_size_v)):
        view, wanted = getattr(cache, name, None), (num_blocks, block_size, layer.num_kv_heads, size)
        if (tuple(getattr(view, "shape", ())), str(getattr(view, "dtype", ""))) != (wanted, f"torch.{dtype}"):
            yield f"the {name}s of layer {layer.name!r} are {_form(view)}, not {dtype} {list(wanted)}"


def _wrong_tensors(
    cache: Any, layer: AttentionLayer, num_blocks: int, block_size: int, tensors: Sequence[CacheTensor]
) -> Iterator[str]:
    names = [tensor.name for tensor in tensors]
    if not isinstance(cache, CacheTensors) or sorted(cache) != sorted(names):
        yield f"the cache of layer {layer.name!r} is {cache!r:.80}, not CacheTensors named {names}"
        return
    for tensor in tensors:
        view = cache[tensor.name]
        wanted = (num_blocks, *((block_size,) if tensor.per == "token" else ()), *tensor.shape)
        if (tuple(getattr(view, "shape", ())), str(getattr(view, "dtype", ""))) != (wanted, f"torch.{tensor.dtype}"):
            yield f"{tensor.name} of layer {layer.name!r} is {_form(view)}, not {tensor.dtype} {list(wanted)}"


def _form(view: Any) -> str:
    if not hasattr(view, "shape"):
        return f"{view!r:.40}"
    return f"{str(view.dtype).removeprefix('torch.')} {list(view.shape)}"


def _nothing(_hash: bytes) -> None:
    """Find no block."""
