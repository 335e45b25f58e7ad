"""From the plan's LoRA plugin to an engine's adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slotline.core.adapters.merged import MergedAdapter
from slotline.core.adapters.slots import Adapters
from slotline.core.adapters.source import AdapterSource
from slotline.core.frontend.lora_request import LoRARequest
from slotline.core.planning.plan import Planned
from slotline.core.scheduling.rows import Rows
from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import AdaptableModel, LoraContext, Model
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ConfigError
from slotline.registry.loading import bind_contract, resolve_factory

OUTPUT_PROJECTION = "lm_head"


def build_adapters(planned: Planned, model: Model, rows: Rows) -> AdapterSource | None:
    """The adapters of a model; None where no plugin is named.

    Raises:
        ConfigError: if a target module is none of the model's, or an embedding that the plugin does not serve.
    """
    descriptor = planned.lora
    if descriptor is None:
        return None
    adaptable: AdaptableModel = model  # type: ignore[assignment]  # its family declares `adapters`
    config, scheduler = planned.loaded.config.lora, planned.loaded.config.scheduler
    modules = target_modules(adaptable, config.target_modules)
    embeddings = tuple(path for path in adaptable.embeddings if path in modules)
    if embeddings and (refusal := descriptor.capabilities.embeddings.refusal(True)):
        raise ConfigError(
            f"lora.target_modules: lora plugin {descriptor.name!r} serves no embedding: {refusal}",
            fix=f"leave out {', '.join(map(_last, embeddings))}, or take another LoRA plugin",
        )
    can_merge = bool(descriptor.capabilities.merged.support)
    merged = tuple(names for names in adaptable.merged_linears if can_merge and set(names) <= modules.keys())
    extends = bool(descriptor.capabilities.extended.support) and not config.merge  # or the weights would not be alone
    extended: set[tuple[str, ...]] = set()

    def extend(names: tuple[str, ...], rows: int, max_tokens: int) -> torch.Tensor | None:
        room = adaptable.extend(names, rows, max_tokens)
        if room is not None:
            extended.add(names)
        return room

    context = LoraContext(
        contract=bind_contract(descriptor),
        modules=modules,
        merged=merged,
        embeddings=embeddings,
        extend=extend if extends else None,
        max_adapters=1 if config.merge else config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
        max_rank=config.max_rank,
        max_tokens=scheduler.max_batched_tokens,
        device=planned.device,
        dtype=planned.plan.dtype,
        options=planned.options(descriptor),
    )
    lora = resolve_factory(descriptor)(context)
    if config.merge:
        dtype = getattr(torch, planned.plan.dtype)
        return MergedAdapter(
            lora,
            adaptable,
            modules,
            embeddings=embeddings,
            max_tokens=context.max_tokens,
            device=planned.device,
            dtype=dtype,
        )
    return Adapters(
        lora,
        adaptable,
        rows,
        modules,
        apply_merged=lora.apply_merged if merged else None,
        merged=merged,
        expand=lora.expand if extended else None,
        extended=extended,
        max_adapters=config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
    )


def target_modules(model: AdaptableModel, asked: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers and embeddings that may carry an adapter; without names, the linear ones before the head.

    Raises:
        ConfigError: naming what the model has.
    """
    linears = {**model.linears, **model.embeddings}
    names = dict.fromkeys(_last(path) for path in linears)
    if unknown := [name for name in asked if name not in names]:
        raise ConfigError(
            f"lora.target_modules: the model has no {', '.join(unknown)} to adapt", fix=f"it has {', '.join(names)}"
        )
    wanted = set(asked)
    return {
        path: sizes
        for path, sizes in linears.items()
        if (_last(path) in wanted if asked else _last(path) != OUTPUT_PROJECTION and path not in model.embeddings)
    }


def has_slots(planned: Planned) -> bool:
    """Whether adapters stand beside the weights, so that a step may have any."""
    return planned.lora is not None and not planned.loaded.config.lora.merge


def captured_for(descriptor: Descriptor[Any], query_len: int, *, specialize: bool) -> tuple[bool, ...]:
    """Whether batches of a query length, 0 for mixed ones, are captured without and with adapters."""
    needed = {0: GraphSupport.ALWAYS, 1: GraphSupport.SINGLE_TOKEN}.get(query_len, GraphSupport.UNIFORM)
    if descriptor.capabilities.graphs.refusal(needed) is not None:
        return (False,)
    return (False, True) if specialize and descriptor.capabilities.graph_key else (True,)


def shared(
    planned: Planned, model: Model, part: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's embedding or output projection for a drafter, which guesses without adapters and for rows that none
    is planned for."""
    if planned.lora is None or not planned.loaded.config.lora.target_modules:  # neither is adapted unless it is named
        return part
    adaptable: AdaptableModel = model  # type: ignore[assignment]

    def without_adapters(inputs: torch.Tensor) -> torch.Tensor:
        adaptable.adapt(None)
        return part(inputs)

    return without_adapters


def load_named(planned: Planned, adapters: AdapterSource | None) -> None:
    """Load the adapters that the configuration names, numbered from 1 in its order.

    Raises:
        RequestError: if one cannot be held.
    """
    for number, (name, path) in enumerate(planned.loaded.paths("lora.adapters").items(), start=1):
        if adapters is not None:
            adapters.add(LoRARequest(name, number, str(path)))


def adapter_notes(planned: Planned) -> tuple[str, ...]:
    """What a reader of the plan should know of the adapters."""
    descriptor, config = planned.lora, planned.loaded.config.lora
    if descriptor is None:
        return ()
    if config.merge:
        notes = [f"lora {descriptor.name}: one adapter at a time, added to the weights"]
    else:
        notes = [f"lora {descriptor.name}: {config.max_adapters} adapters of rank {config.max_rank} at most in a batch"]
        if planned.plan.graphs.resolved != "none" and captured_for(descriptor, 1, specialize=True) == (False,):
            notes.append(f"lora {descriptor.name}: its products cannot be captured, steps with adapters run eagerly")
    if planned.drafter is not None:
        notes.append(f"drafter {planned.drafter.name}: guesses without adapters; what it guesses is verified with them")
    return tuple(notes)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
