"""Caches of named tensors: their sizes, shapes, places, and ownership of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from slotline.registry.contracts import AttentionLayer, CacheTensor, CacheTensors
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_spec import Group, build_group, element_bytes, memory_cases, other_formats
from slotline.testing.subject import Subject

NUM_BLOCKS = 3
MOST_CASES = 12
GUARD = 256
"""Bytes on each side of the memory that is bound."""
GAP = 48
"""Bytes before and behind a kernel block where pages lie apart."""


def by_format(subject: Subject) -> Iterable[Case]:
    """Return block sizes, layouts, shapes and dtypes, with the declared formats in turn."""
    formats = other_formats(subject)
    if not formats:
        raise NotApplicable("no cache format other than plain is declared")
    cases = list(memory_cases(subject))[: None if subject.exhaustive else MOST_CASES]
    return [{**case, "format": formats[i % len(formats)]} for i, case in enumerate(cases)]


def declared(group: Group, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
    """Return the tensors that a spec says a layer has."""
    found = tuple(group.spec.tensors(layer))
    if not found or any(not isinstance(each, CacheTensor) for each in found):
        raise Failed(f"tensors({layer.name}) is {found!r:.100}, wanted at least one CacheTensor")
    if len({each.name for each in found}) < len(found):
        raise Failed(f"tensors({layer.name}) has a name twice: {[each.name for each in found]}")
    return found


def size_of(tensor: CacheTensor, tokens: int) -> int:
    """Return the bytes of a tensor in a kernel block of `tokens` tokens."""
    return int(prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize * (tokens if tensor.per == "token" else 1))


@check(Kind.KV_SPEC, "kv_spec.tensors.bytes", Level.NUMERICS, cases=by_format, cost=0.01)
def tensors_bytes(run: Run) -> None:
    """A page has room for all declared tensors of each of its kernel blocks."""
    group = build_group(run)
    for layer in group.layers:
        found = group.spec.page_bytes(layer)
        wanted = group.ratio * sum(size_of(each, group.context.kernel_block_size) for each in declared(group, layer))
        if not isinstance(found, int) or found < wanted or found % group.ratio:
            raise Failed(
                f"page_bytes({layer.name}) is {found!r}; the tensors of {group.ratio} kernel blocks need {wanted} or a "
                f"larger multiple of {group.ratio}"
            )
        run.measured["padding"] = max(run.measured.get("padding", 0), found - wanted)


@check(Kind.KV_SPEC, "kv_spec.tensors.shape", Level.NUMERICS, cases=by_format)
def tensors_shape(run: Run) -> None:
    """`bind` returns the declared tensors, one entry a token or kernel block, in the layout's order."""
    group = build_group(run)
    tokens, kernel_blocks = group.context.kernel_block_size, NUM_BLOCKS * group.ratio
    for layer in group.layers:
        cache, _ = _bound(run, group, layer)
        for each in declared(group, layer):
            view = cache[each.name]
            wanted = (kernel_blocks, *((tokens,) if each.per == "token" else ()), *each.shape)
            if tuple(view.shape) != wanted or view.dtype is not getattr(torch, each.dtype):
                raise Failed(
                    f"{each.name} of {layer.name} is {view.dtype} {tuple(view.shape)}, wanted {each.dtype} {wanted}"
                )
            if each.per == "token" and each.by_head and tokens > 1 and each.shape[0] > 1:
                _, token, head, *_ = view.stride()
                if (token > head) != (group.context.layout == "NHD"):
                    raise Failed(f"{each.name} of {layer.name} has strides {view.stride()}, not {group.context.layout}")


@check(Kind.KV_SPEC, "kv_spec.tensors.own_memory", Level.HOSTILE, cases=by_format)
def tensors_own_memory(run: Run) -> None:
    """Every element has its own bytes in its kernel block's part of the memory, from the declared alignment on."""
    group = build_group(run)
    for layer in group.layers:
        cache, raw = _bound(run, group, layer)
        taken, per_block = torch.zeros(raw.numel(), dtype=torch.bool), raw.numel() // (NUM_BLOCKS * group.ratio)
        for each in declared(group, layer):
            first = element_bytes(cache[each.name], raw)
            width = cache[each.name].element_size()
            if int(first.min()) < 0 or int(first.max()) + width > raw.numel():
                raise Failed(
                    f"{each.name} of {layer.name} leaves the memory: bytes {int(first.min())} to {int(first.max())}"
                )
            block = torch.arange(len(first)).view(-1, *[1] * (first.dim() - 1))
            if bool((first // per_block != block).any()):
                raise Failed(
                    f"{each.name} of {layer.name} lies outside its own kernel block, which is copied as a whole"
                )
            begin = int(first.flatten(1).amin(1)[0])
            if begin % each.alignment:
                raise Failed(
                    f"{each.name} of {layer.name} begins at byte {begin}, not at a multiple of {each.alignment}"
                )
            own = (first.flatten()[:, None] + torch.arange(width)).flatten()
            if bool(taken[own].any()) or len(own.unique()) < len(own):
                raise Failed(f"{each.name} of {layer.name} shares bytes with itself or another tensor")
            taken[own] = True


@check(Kind.KV_SPEC, "kv_spec.tensors.page_stride", Level.HOSTILE, needs={"page_stride": True}, cases=by_format)
def tensors_page_stride(run: Run) -> None:
    """Kernel blocks that lie apart bind like others; what is written is read back, and nothing between them changes."""
    group, device = build_group(run), run.subject.device.type
    for layer in group.layers:
        size, count = group.spec.page_bytes(layer) // group.ratio, NUM_BLOCKS * group.ratio
        rows = torch.full((count, -(-size // 16) * 16 + 2 * GAP), 0xA5, dtype=torch.uint8, device=device)
        cache = group.spec.bind(rows[:, GAP : GAP + size].zero_(), layer, NUM_BLOCKS)
        for number, name in enumerate(cache, 1):
            cache[name].copy_(_numbers(cache[name], number))
        for number, name in enumerate(cache, 1):
            if not torch.equal(cache[name], _numbers(cache[name], number)):
                raise Failed(f"{name} of {layer.name} does not hold what was written to it where pages lie apart")
        if bool((rows[:, :GAP] != 0xA5).any() or (rows[:, GAP + size :] != 0xA5).any()):
            raise Failed(f"a write to the tensors of {layer.name} changed bytes between the pages")


def _numbers(view: torch.Tensor, number: int) -> torch.Tensor:
    """Return small numbers, different for neighbouring blocks and for tensors of other numbers."""
    block = torch.arange(len(view), device=view.device).view(-1, *[1] * (view.dim() - 1))
    return ((block + 3 * number) % 8 + 1).to(view.dtype).expand(view.shape)


def _bound(run: Run, group: Group, layer: AttentionLayer) -> tuple[CacheTensors, torch.Tensor]:
    """Return a layer's tensors and their memory, which begins in the middle of a larger buffer."""
    size = NUM_BLOCKS * group.spec.page_bytes(layer)
    buffer = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=run.subject.device.type)
    raw = buffer[GUARD : GUARD + size].zero_()
    cache = group.spec.bind(raw, layer, NUM_BLOCKS)
    names = [each.name for each in declared(group, layer)]
    if not isinstance(cache, CacheTensors) or sorted(cache) != sorted(names):
        raise Failed(f"bind returned {cache!r:.100}, wanted CacheTensors named {names}")
    return cache, raw
