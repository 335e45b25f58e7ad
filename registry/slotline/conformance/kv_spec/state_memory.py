"""Memory of states: the sizes of a spec, and the tensors that `bind` creates from a layer's slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.contracts import StateLayer
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.kv_spec import element_bytes
from slotline.testing.environments.state_spec import Held, build_spec, context_of, num_bytes, state_cases

NUM_SLOTS = 5
GUARD = 256
"""Bytes on each side of a layer's memory, which is bound in the middle of a larger buffer."""

Bound = tuple[Held, StateLayer, torch.Tensor, Mapping[str, torch.Tensor]]


def bound(run: Run, num_slots: int = NUM_SLOTS) -> list[Bound]:
    """Return each layer's memory [num_slots, page_bytes], with guards of 0xA5 around it, and its tensors."""
    held, found = build_spec(run), []
    for layer in held.layers:
        raw = memory(held, layer, num_slots, run.subject.device.type)
        found.append((held, layer, raw, held.spec.bind(raw, layer, num_slots)))
    return found


def memory(held: Held, layer: StateLayer, num_slots: int, device: str) -> torch.Tensor:
    """Return zeros [num_slots, page_bytes] uint8 out of a larger buffer."""
    page = held.spec.page_bytes(layer)
    buffer = torch.full((num_slots * page + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=device)
    return buffer[GUARD:-GUARD].zero_().view(num_slots, page)


def surroundings(raw: torch.Tensor) -> torch.Tensor:
    """Return the guards in front of a memory and at its end, [2, GUARD] uint8."""
    first, last = raw.storage_offset() - GUARD, raw.storage_offset() + raw.numel()
    return torch.stack([torch.as_strided(raw, (GUARD,), (1,), place) for place in (first, last)])


@check(Kind.KV_SPEC, "kv_spec.state.figures", Level.NUMERICS, cases=state_cases, cost=0.01)
def figures(run: Run) -> None:
    """The interval is a positive multiple of the prefix unit, and the alignment is a positive number of bytes."""
    held = build_spec(run)
    interval, alignment = held.spec.interval, held.spec.alignment
    if not _is_count(interval) or interval % held.unit:
        raise Failed(f"interval is {interval!r}, wanted a positive multiple of {held.unit}")
    if not _is_count(alignment):
        raise Failed(f"alignment is {alignment!r}, wanted a positive int")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@check(Kind.KV_SPEC, "kv_spec.state.page", Level.NUMERICS, cases=state_cases, cost=0.01)
def page(run: Run) -> None:
    """A slot's page has room for all tensors of the layer, and its slots keep the alignment."""
    held = build_spec(run)
    for layer in held.layers:
        found, wanted = held.spec.page_bytes(layer), sum(map(num_bytes, layer.tensors))
        if not _is_count(found) or found < wanted:
            raise Failed(f"{layer.name}: page_bytes is {found!r}, and its tensors take {wanted}")
        if found % held.spec.alignment:
            raise Failed(
                f"{layer.name}: page_bytes is {found}, so that the second slot is at no multiple of the alignment, "
                f"{held.spec.alignment}"
            )
        run.measured["padding"] = max(run.measured.get("padding", 0), found - wanted)


@check(Kind.KV_SPEC, "kv_spec.state.bind.shape", Level.NUMERICS, cases=state_cases, cost=0.02)
def bind_shape(run: Run) -> None:
    """`bind` gives every tensor of the layer under its name, [num_slots, *shape] of its dtype."""
    for _, layer, raw, tensors in bound(run):
        wanted_names = [tensor.name for tensor in layer.tensors]
        if sorted(tensors) != sorted(wanted_names):
            raise Failed(f"{layer.name}: bind gives {sorted(tensors)}, wanted {sorted(wanted_names)}")
        for wanted in layer.tensors:
            found, shape = tensors[wanted.name], (NUM_SLOTS, *wanted.shape)
            if tuple(found.shape) != shape:
                raise Failed(f"{layer.name}: {wanted.name} has shape {tuple(found.shape)}, wanted {shape}")
            if found.dtype is not getattr(torch, wanted.dtype) or found.device != raw.device:
                raise Failed(f"{layer.name}: {wanted.name} is {found.dtype} on {found.device}, wanted {wanted.dtype}")


@check(Kind.KV_SPEC, "kv_spec.state.bind.own_memory", Level.HOSTILE, cases=state_cases, cost=0.03)
def bind_own_memory(run: Run) -> None:
    """Slot i of each tensor lies in row i of the memory, at a multiple of the alignment, on bytes of its own."""
    for held, layer, raw, tensors in bound(run):
        size, alignment = raw.shape[1], held.spec.alignment
        owners = torch.full((raw.numel(),), -1, dtype=torch.int64)  # the tensor that each byte belongs to
        for number, (name, view) in enumerate(tensors.items()):
            first = element_bytes(view, raw)  # [num_slots, *shape]
            last = first + view.element_size() - 1
            for slot in range(NUM_SLOTS):
                low, high = int(first[slot].min()), int(last[slot].max())
                if low < slot * size or high >= (slot + 1) * size:
                    raise Failed(
                        f"{layer.name}: slot {slot} of {name} spans the bytes {low} to {high}; its row has the bytes "
                        f"{slot * size} to {(slot + 1) * size - 1}"
                    )
                if low % alignment:
                    raise Failed(
                        f"{layer.name}: slot {slot} of {name} begins at byte {low}, which is no multiple of the "
                        f"alignment, {alignment}"
                    )
            own = (first.flatten()[:, None] + torch.arange(view.element_size())).flatten()
            if len(own.unique()) < len(own):
                raise Failed(f"{layer.name}: two elements of {name} share bytes; strides {tuple(view.stride())}")
            if (others := sorted({int(owner) for owner in owners[own].unique()} - {-1})) != []:
                raise Failed(f"{layer.name}: {name} lies on bytes of {[list(tensors)[other] for other in others]}")
            owners[own] = number


@check(Kind.KV_SPEC, "kv_spec.state.bind.write_read", Level.HOSTILE, cases=state_cases, cost=0.03)
def bind_write_read(run: Run) -> None:
    """Values written to a slot are read back, and no other tensor, slot or surrounding byte changes."""
    for _, layer, raw, tensors in bound(run):
        places = [(name, slot) for name in tensors for slot in range(NUM_SLOTS)]
        for number, (name, slot) in enumerate(places, 1):
            before = raw.clone()
            tensors[name][slot].fill_(number)  # exact in every dtype
            if bool((tensors[name][slot] != number).any()):
                raise Failed(f"{layer.name}: slot {slot} of {name} does not hold what was written to it")
            changed = (before != raw).any(dim=1).nonzero().flatten().tolist()
            if changed != [slot]:
                raise Failed(f"{layer.name}: a write to slot {slot} of {name} changed the rows {changed} of the memory")
        for number, (name, slot) in enumerate(places, 1):
            if bool((tensors[name][slot] != number).any()):
                raise Failed(f"{layer.name}: slot {slot} of {name} was changed by a write to another")
        if bool((surroundings(raw) != 0xA5).any()):
            raise Failed(f"{layer.name}: a write to its tensors changed bytes outside of the memory that was given")


@check(Kind.KV_SPEC, "kv_spec.state.bind.sizes", Level.HOSTILE, cases=state_cases, cost=0.02)
def bind_sizes(run: Run) -> None:
    """One slot binds, many do, and two memories of one spec have nothing in common."""
    held, device = build_spec(run), run.subject.device.type
    for num_slots in (1, 2, 33):
        for layer in held.layers:
            raws = [memory(held, layer, num_slots, device) for _ in range(2)]
            both = [held.spec.bind(raw, layer, num_slots) for raw in raws]
            for tensor in layer.tensors:
                found = tuple(both[0][tensor.name].shape)
                if found != (num_slots, *tensor.shape):
                    raise Failed(f"{layer.name}: {tensor.name} of {num_slots} slots has shape {found}")
                both[0][tensor.name].fill_(1)
            if bool(raws[1].any()) or not bool(raws[0].any(dim=1).all()):
                raise Failed(f"{layer.name}: of two memories, a write to one did not reach it, or reached the other")


@check(Kind.KV_SPEC, "kv_spec.state.page_again", Level.HOSTILE, cases=state_cases, cost=0.02)
def page_again(run: Run) -> None:
    """`page_bytes` and the interval stay as they are after `bind`, and after a spec of other layers was built."""
    held = build_spec(run)

    def answers() -> list[int]:
        return [*(held.spec.page_bytes(layer) for layer in held.layers), held.spec.interval, held.spec.alignment]

    first = answers()
    for layer in held.layers:
        held.spec.bind(memory(held, layer, NUM_SLOTS, run.subject.device.type), layer, NUM_SLOTS)
    other = context_of(run["kind"], unit=3 * held.unit, dtype="float64", max_model_len=64)
    built = run.subject.build(other)
    for layer in other.layers:
        built.page_bytes(layer)
    if (again := answers()) != first:
        raise Failed(f"pages of the layers, interval and alignment were {first}; later they are {again}")
