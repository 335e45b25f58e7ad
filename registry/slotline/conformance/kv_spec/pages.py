"""Pages and the views of `bind`: sizes, shapes, strides, and ownership of bytes."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts import AttentionLayer
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.kv_spec import (
    KNOWN_KINDS,
    Group,
    build_group,
    context_of,
    element_bytes,
    every_kind_cases,
    memory_cases,
)

PLAIN_ONLY = {"formats": "plain"}
"""Need of the checks of keys and values; `kv_spec.tensors` has those of other formats."""
NUM_BLOCKS = 5
GUARD = 256
"""Bytes on each side of a cache that is bound in the middle of a larger buffer; a multiple of every element size."""
GAP = 16
"""Bytes before and behind a kernel block where pages lie apart; the alignment that the core keeps."""


def bound(run: Run, num_blocks: int = NUM_BLOCKS) -> list[tuple[Group, AttentionLayer, torch.Tensor, Any]]:
    """Return each layer's raw bytes, with guards of 0xA5 around them, and its cache."""
    group, device = build_group(run), run.subject.device.type
    found = []
    for layer in group.layers:
        size = num_blocks * group.spec.page_bytes(layer)
        buffer = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=device)
        raw = buffer[GUARD : GUARD + size].zero_()
        found.append((group, layer, raw, group.spec.bind(raw, layer, num_blocks)))
    return found


def where(layer: AttentionLayer, name: str) -> str:
    """Return a layer and one of its views, for messages."""
    return f"layer of {layer.num_kv_heads} KV heads of {layer.head_size} and {layer.head_size_v}: {name}"


def own_views(layer: AttentionLayer, cache: Any) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return the views that have memory of their own, with names. Values of latents have none."""
    return (("key", cache.key),) if layer.mla else (("key", cache.key), ("value", cache.value))


@check(Kind.KV_SPEC, "kv_spec.page.bytes", Level.NUMERICS, needs=PLAIN_ONLY, cases=memory_cases, cost=0.01)
def page_bytes(run: Run) -> None:
    """A page has room for the keys and the values of a block's tokens."""
    group = build_group(run)
    itemsize = getattr(torch, run["dtype"]).itemsize
    for layer in group.layers:
        found = group.spec.page_bytes(layer)
        if not isinstance(found, int) or found <= 0:
            raise Failed(f"page_bytes returned {found!r}, wanted a positive int")
        own = layer.head_size if layer.mla else layer.head_size + layer.head_size_v  # latents hold their values
        wanted = group.block_size * layer.num_kv_heads * own * itemsize
        if layer.kv_kind in KNOWN_KINDS and found < wanted:
            raise Failed(
                f"{where(layer, 'page_bytes')} is {found}; {group.block_size} tokens of {run['dtype']} need {wanted}"
            )
        run.measured["padding"] = max(run.measured.get("padding", 0), found - wanted)


@check(Kind.KV_SPEC, "kv_spec.bind.shape", Level.NUMERICS, needs=PLAIN_ONLY, cases=memory_cases, cost=0.05)
def bind_shape(run: Run) -> None:
    """Both views are [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of the cache dtype."""
    for group, layer, raw, cache in bound(run):
        for name, view, size in (("key", cache.key, layer.head_size), ("value", cache.value, layer.head_size_v)):
            tokens = group.context.kernel_block_size
            wanted = (NUM_BLOCKS * group.ratio, tokens, layer.num_kv_heads, size)
            if tuple(view.shape) != wanted:
                raise Failed(f"{where(layer, name)} has shape {tuple(view.shape)}, wanted {wanted}")
            if view.dtype is not getattr(torch, run["dtype"]) or view.device != raw.device:
                raise Failed(f"{where(layer, name)} is {view.dtype} on {view.device}, wanted {run['dtype']}")
            if view.stride(3) != 1:
                raise Failed(f"{where(layer, name)}: stride of the last dimension is {view.stride(3)}, wanted 1")


@check(Kind.KV_SPEC, "kv_spec.bind.layout", Level.NUMERICS, needs=PLAIN_ONLY, cases=memory_cases)
def bind_layout(run: Run) -> None:
    """NHD has a token's heads side by side in memory, HND a head's tokens."""
    for _, layer, _, cache in bound(run):
        for name, view in (("key", cache.key), ("value", cache.value)):
            _, token, head, _ = view.stride()
            if view.shape[1] == 1 or view.shape[2] == 1:
                continue  # a dimension of one has no order
            if (token > head) != (run["layout"] == "NHD"):
                raise Failed(
                    f"{where(layer, name)}: strides {tuple(view.stride())} of (block, token, head, dim) are not "
                    f"{run['layout']}"
                )


@check(Kind.KV_SPEC, "kv_spec.bind.own_memory", Level.HOSTILE, needs=PLAIN_ONLY, cases=memory_cases)
def bind_own_memory(run: Run) -> None:
    """Every element of keys and values has its own bytes in the given memory, except values of latents."""
    for _, layer, raw, cache in bound(run):
        if layer.mla:
            _values_of_latents(layer, raw, cache)
        taken = torch.zeros(raw.numel(), dtype=torch.bool)
        for name, view in own_views(layer, cache):
            first = element_bytes(view, raw)
            if int(first.min()) < 0 or int(first.max()) + view.element_size() > raw.numel():
                raise Failed(
                    f"{where(layer, name)} spans the bytes {int(first.min())} to {int(first.max())} of {raw.numel()}"
                )
            own = (first.flatten()[:, None] + torch.arange(view.element_size())).flatten()
            if len(own.unique()) < len(own):
                raise Failed(f"{where(layer, name)}: two of its elements share bytes; strides {tuple(view.stride())}")
            if bool(taken[own].any()):
                at = int((taken[own].view(-1, view.element_size()).any(dim=1)).nonzero()[0])
                block, token, head, dim = (int(i) for i in torch.unravel_index(torch.tensor(at), view.shape))
                raise Failed(f"{where(layer, name)}[{block}, {token}, {head}, {dim}] lies on bytes of the keys")
            taken[own] = True


def _values_of_latents(layer: AttentionLayer, raw: torch.Tensor, cache: Any) -> None:
    """Raise `Failed` unless the values are the keys' first numbers."""
    keys, values = (element_bytes(view, raw) for view in cache)
    if not torch.equal(keys[..., : layer.head_size_v], values):
        raise Failed(f"{where(layer, 'value')} does not lie on the keys' first {layer.head_size_v} numbers")


@check(Kind.KV_SPEC, "kv_spec.bind.write_read", Level.HOSTILE, needs=PLAIN_ONLY, cases=memory_cases)
def bind_write_read(run: Run) -> None:
    """Values written through the views are read back, and nothing around the memory changes."""
    for _, layer, raw, cache in bound(run):
        size = raw.numel()
        buffer = torch.as_strided(raw, (size + 2 * GUARD,), (1,), raw.storage_offset() - GUARD)
        wanted = []
        for sign, (_, view) in zip((1, -1), own_views(layer, cache), strict=False):
            block, token, head, dim = (torch.arange(n, device=view.device) for n in view.shape)
            number = block[:, None, None, None] + token[:, None, None] + 3 * head[:, None] + 5 * dim
            wanted.append((sign * (number % 8 + 1)).float())  # exact in every dtype
            view.copy_(wanted[-1].to(view.dtype))
        if layer.mla:
            wanted.append(wanted[0][..., : layer.head_size_v])
        for name, view, numbers in (("key", cache.key, wanted[0]), ("value", cache.value, wanted[1])):
            wrong = (view.float() != numbers).nonzero().tolist()
            if wrong:
                raise Failed(f"{where(layer, name)}{wrong[0]} does not hold what was written to it")
        for name, guard in (("before", buffer[:GUARD]), ("behind", buffer[-GUARD:])):
            if bool((guard != 0xA5).any()):
                raise Failed(f"{where(layer, 'a write to its views')} changed bytes {name} the memory that was given")


@check(
    Kind.KV_SPEC,
    "kv_spec.bind.page_stride",
    Level.HOSTILE,
    needs={**PLAIN_ONLY, "page_stride": True},
    cases=memory_cases,
)
def bind_page_stride(run: Run) -> None:
    """Kernel blocks that lie apart, as groups that share a pool have them, bind like those that do not."""
    group, device = build_group(run), run.subject.device.type
    for layer in group.layers:
        size = group.spec.page_bytes(layer) // group.ratio
        rows = torch.full((NUM_BLOCKS * group.ratio, -(-size // GAP) * GAP + 2 * GAP), 0xA5, dtype=torch.uint8)
        rows = rows.to(device)
        raw = rows[:, GAP : GAP + size].zero_()
        cache = group.spec.bind(raw, layer, NUM_BLOCKS)
        for name, view, wanted in (("key", cache.key, layer.head_size), ("value", cache.value, layer.head_size_v)):
            shape = (len(rows), group.context.kernel_block_size, layer.num_kv_heads, wanted)
            if tuple(view.shape) != shape:
                raise Failed(f"{where(layer, name)} has shape {tuple(view.shape)}, wanted {shape}")
        numbers = (torch.arange(len(rows), device=device) % 8 + 1).float()[:, None, None, None]  # exact in every dtype
        cache.key.copy_(numbers.expand(cache.key.shape).to(cache.key.dtype))
        of_values = 1 if layer.mla else -1
        cache.value.copy_((of_values * numbers).expand(cache.value.shape).to(cache.value.dtype))
        for name, view, sign in (("key", cache.key, 1), ("value", cache.value, of_values)):
            if bool((view.float() != sign * numbers).any()):
                raise Failed(f"{where(layer, name)} does not hold what was written to it where pages lie apart")
        if bool((raw == 0).all(dim=1).any()):
            raise Failed(f"{where(layer, 'a write to its views')} did not reach the memory of each kernel block")
        if bool((rows[:, :GAP] != 0xA5).any() or (rows[:, GAP + size :] != 0xA5).any()):
            raise Failed(f"{where(layer, 'a write to its views')} changed bytes between the pages")


@check(Kind.KV_SPEC, "kv_spec.bind.sizes", Level.HOSTILE, needs=PLAIN_ONLY, cases=every_kind_cases)
def bind_sizes(run: Run) -> None:
    """A single block can be bound, as for profiling, and so can two caches of one spec, each with its own memory."""
    group, device = build_group(run), run.subject.device.type
    for num_blocks in (1, 2, 7):
        for layer in group.layers:
            size = num_blocks * group.spec.page_bytes(layer)
            raws = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
            caches = [group.spec.bind(raw, layer, num_blocks) for raw in raws]
            for cache, raw in zip(caches, raws, strict=True):
                for name, view in (("key", cache.key), ("value", cache.value)):
                    if view.shape[0] != num_blocks * group.ratio:
                        raise Failed(f"{where(layer, name)} of {num_blocks} blocks has {view.shape[0]} kernel blocks")
                    element_bytes(view, raw)
            caches[0].key.fill_(1.0)
            caches[0].value.fill_(1.0)
            if bool(raws[1].any()):
                raise Failed(f"{where(layer, 'a write')} to one cache changed another that was bound before")


@check(Kind.KV_SPEC, "kv_spec.context.unchanged", Level.HOSTILE, cases=every_kind_cases)
def context_unchanged(run: Run) -> None:
    """Two specs of different groups, built one after the other, do not change each other's answers."""
    first = build_group(run)
    pages = [first.spec.page_bytes(layer) for layer in first.layers]
    held = first.spec.max_blocks_held()
    other = context_of(run, max_model_len=2 * first.max_model_len, kv_dtype="bfloat16")
    run.subject.build(other).max_blocks_held()
    again = [first.spec.page_bytes(layer) for layer in first.layers]
    if (again, first.spec.max_blocks_held()) != (pages, held):
        raise Failed(
            f"page_bytes were {pages} and max_blocks_held {held}; once a spec of another group was built they are "
            f"{again} and {first.spec.max_blocks_held()}"
        )
