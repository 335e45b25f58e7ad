"""From the plan's LoRA plugin to an engine's adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve

from slotline.core.api.lora_request import LoRARequest
from slotline.core.batch.adapter_usage import AdapterUse
from slotline.core.batch.request_table import RequestTable
from slotline.core.builder.plugin_construction import oom_as_capacity_error
from slotline.core.lora.manager_protocol import AdapterManager
from slotline.core.lora.merged import MergedAdapter
from slotline.core.lora.pipeline import PipelineLora, StagePlugin
from slotline.core.lora.slot_manager import AdapterSlots
from slotline.planner.plan import Planned
from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import AdaptableModel, LoraContext, Model
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ConfigError
from slotline.registry.loading import bind_contract, label_of

OUTPUT_PROJECTION = "lm_head"


def build_adapters(planned: Planned, model: Model, rows: RequestTable) -> AdapterManager | None:
    """Build the adapters of a model. Return None if the plan names no LoRA plugin.

    Raises:
        ConfigError: if a target module is not in the model, or is an embedding that the plugin does not serve.
        PluginError: if the plugin cannot be built.
        CapacityError: if its slots take more memory than there is.
    """
    descriptor = planned.lora
    if descriptor is None:
        return None
    adaptable: AdaptableModel = model  # type: ignore[assignment]  # its family declares `adapters`
    config, scheduler = planned.loaded.config.lora, planned.loaded.config.scheduler
    modules = target_modules(adaptable, config.target_modules)
    embeddings = tuple(path for path in embeddings_of(adaptable) if path in modules)
    if embeddings and (refusal := descriptor.capabilities.embeddings.refusal(True)):
        raise ConfigError(
            f"lora.target_modules: lora plugin {descriptor.name!r} serves no embedding: {refusal}",
            fix=f"leave out {', '.join(map(_last, embeddings))}, or take another LoRA plugin",
        )
    can_merge = bool(descriptor.capabilities.merged.support)
    merged = tuple(names for names in adaptable.merged_linears if can_merge and set(names) <= modules.keys())
    single, extended = serves_single(planned), set[tuple[str, ...]]()

    def extend(names: tuple[str, ...], rows: int, max_tokens: int, single_rows: int = 0) -> torch.Tensor | None:
        further = {"single_rows": single_rows} if single else {}
        room = adaptable.extend(names, rows, max_tokens, **further)
        if room is not None:
            extended.add(names)
        return room

    # Uniform batches are captured for all requests, even if the budget lets fewer run.
    largest_batch = scheduler.max_requests * (1 + (planned.loaded.config.drafter.tokens if planned.drafter else 0))
    extends = bool(descriptor.capabilities.extended.support) and hasattr(adaptable, "extend")
    context = LoraContext(
        contract=bind_contract(descriptor),
        modules=modules,
        merged=merged,
        embeddings=embeddings,
        extend=extend if extends and not config.merge else None,  # merged weights have no extra rows
        max_adapters=1 if config.merge else config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
        max_rank=config.max_rank,
        batch_invariant=planned.loaded.config.batch_invariant,
        max_tokens=max(scheduler.max_batched_tokens, largest_batch),
        device=planned.device,
        dtype=planned.plan.dtype,
        options=planned.options(descriptor),
    )
    factory = planned.registry.factory(descriptor)

    def build(context: LoraContext) -> Any:
        return planned.registry.accept(descriptor, factory(context))

    divided = [stage.device for stage in planned.stages.divided]
    with (
        planned.registry.building(descriptor),
        oom_as_capacity_error(f"{label_of(descriptor)} with its slots", "lower lora.max_adapters or lora.max_rank"),
    ):
        lora: Any = _staged(build, context, divided, adaptable.adapter_stages) if divided else build(context)
    if config.merge:
        dtype = getattr(torch, planned.plan.dtype)
        return MergedAdapter(
            lora,
            adaptable,
            modules,
            embeddings=embeddings,
            max_tokens=context.max_tokens,
            device_of={
                path: divided[adaptable.adapter_stages[path]] if divided else planned.device for path in modules
            },
            dtype=dtype,
        )
    return AdapterSlots(
        lora,
        adaptable,
        rows,
        modules,
        apply_merged=lora.apply_merged if merged else None,
        merged=merged,
        expand=lora.expand if extended else None,
        extended=extended,
        plan_single=lora.plan_single if single else None,
        max_adapters=config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
    )


def _staged(
    build: Callable[[LoraContext], Any], context: LoraContext, devices: Sequence[str], stage_of: Mapping[str, int]
) -> PipelineLora:
    """Build a plugin for each stage, with the modules of that stage."""
    parts = []
    for stage, device in enumerate(devices):
        own = {path: sizes for path, sizes in context.modules.items() if stage_of[path] == stage}
        parts.append(
            evolve(
                context,
                modules=own,
                merged=tuple(names for names in context.merged if names[0] in own),
                elsewhere={path: sizes for path, sizes in context.modules.items() if path not in own},
                device=device,
            )
        )
    return PipelineLora(
        [StagePlugin(build(part), part.device) for part in parts], {path: stage_of[path] for path in context.modules}
    )


def target_modules(model: AdaptableModel, asked: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the linear layers and embeddings that may carry an adapter.

    Without names these are the linear layers except the output projection.

    Raises:
        ConfigError: naming the layers that the model has.
    """
    embeddings = embeddings_of(model)
    linears = {**model.linears, **embeddings}
    names = dict.fromkeys(_last(path) for path in linears)
    if unknown := [name for name in asked if name not in names]:
        raise ConfigError(
            f"lora.target_modules: the model has no {', '.join(unknown)} to adapt", fix=f"it has {', '.join(names)}"
        )
    wanted = set(asked)
    return {
        path: sizes
        for path, sizes in linears.items()
        if (_last(path) in wanted if asked else _last(path) != OUTPUT_PROJECTION and path not in embeddings)
    }


def has_slots(planned: Planned) -> bool:
    """Return whether adapters are held in slots apart from the weights, so that any step may use them."""
    return planned.lora is not None and not planned.loaded.config.lora.merge


def embeddings_of(model: AdaptableModel) -> Mapping[str, tuple[int, int]]:
    """Return the embeddings that adapters can join. A family may declare none."""
    found: Mapping[str, tuple[int, int]] = getattr(model, "embeddings", {})
    return found


def serves_single(planned: Planned) -> bool:
    """Return whether plugin and model have a separate path for one adapter, and several may be loaded."""
    if planned.lora is None or not has_slots(planned) or planned.loaded.config.lora.max_adapters == 1:
        return False
    offer, family = planned.lora.capabilities, planned.family_descriptor.capabilities
    return bool(offer.single.support and family.single_adapter.support)


def uses(planned: Planned) -> tuple[AdapterUse, ...]:
    """Return the uses of adapters that a step may have, in ascending order."""
    if not has_slots(planned):
        return (AdapterUse.NONE,)
    return tuple(use for use in AdapterUse if use != AdapterUse.ONE or serves_single(planned))


def captured_for(
    descriptor: Descriptor[Any], query_len: int, *, specialize: bool, single: bool = False
) -> tuple[AdapterUse, ...]:
    """Return the uses of adapters for which batches of a query length are captured, in ascending order.

    A query length of 0 means mixed batches. They have no graphs of their own for one adapter: their tokens are many,
    and each shape may take a graph for every layer.

    """
    needed = {0: GraphSupport.ALWAYS, 1: GraphSupport.SINGLE_TOKEN}.get(query_len, GraphSupport.UNIFORM)
    if descriptor.capabilities.graphs.refusal(needed) is not None:
        return (AdapterUse.NONE,)
    if not (specialize and descriptor.capabilities.graph_key):
        return (AdapterUse.MANY,)
    return tuple(use for use in AdapterUse if use != AdapterUse.ONE or (single and query_len > 0))


def shared(
    planned: Planned, model: Model, part: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the model's embedding or output projection for a drafter.

    The drafter guesses without adapters, and for rows that no adapter is planned for.
    """
    if planned.lora is None or not planned.loaded.config.lora.target_modules:  # neither is adapted unless it is named
        return part
    adaptable: AdaptableModel = model  # type: ignore[assignment]

    def without_adapters(inputs: torch.Tensor) -> torch.Tensor:
        adaptable.adapt(None)
        return part(inputs)

    return without_adapters


def load_named(planned: Planned, adapters: AdapterManager | None) -> None:
    """Load the adapters that the configuration names, numbered from 1 in its order.

    Raises:
        RequestError: if one cannot be held.
    """
    for number, (name, path) in enumerate(planned.loaded.paths("lora.adapters").items(), start=1):
        if adapters is not None:
            adapters.add(LoRARequest(name, number, str(path)))


def adapter_notes(planned: Planned) -> tuple[str, ...]:
    """Return the remarks on adapters that are shown with the plan."""
    descriptor, config = planned.lora, planned.loaded.config.lora
    if descriptor is None:
        return ()
    if config.merge:
        notes = [f"lora {descriptor.name}: one adapter at a time, added to the weights"]
    else:
        notes = [f"lora {descriptor.name}: {config.max_adapters} adapters of rank {config.max_rank} at most in a batch"]
        if planned.plan.graphs.resolved != "none" and captured_for(descriptor, 1, specialize=True) == (
            AdapterUse.NONE,
        ):
            notes.append(f"lora {descriptor.name}: its products cannot be captured, steps with adapters run eagerly")
    if planned.drafter is not None:
        notes.append(f"drafter {planned.drafter.name}: guesses without adapters; what it guesses is verified with them")
    return tuple(notes)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
