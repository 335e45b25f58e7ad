"""Construction of the extension `adapters` from the plan's LoRA plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve

from slotline.builder.parts import Parts
from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.planner.plan import Planned
from slotline.planner.ranks import shard_of
from slotline.plugins.lora.manager.adapter_use import AdapterUse, captured_for
from slotline.plugins.lora.manager.merged import MergedAdapter
from slotline.plugins.lora.manager.pipeline import PipelineLora, StagePlugin
from slotline.plugins.lora.manager.slot_manager import AdapterSlots
from slotline.plugins.lora.manager.step_adapters import OUTPUT_PROJECTION, StepAdapters
from slotline.registry.contracts import AdaptableModel, ExtensionContext, LoraContext, ModulePart
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ConfigError
from slotline.registry.loading import bind_contract, label_of

Names = tuple[str, ...]
Sizes = Mapping[str, tuple[int, int]]


def build_adapters(context: ExtensionContext) -> AdapterSlots | MergedAdapter:
    """Build the adapters of an engine.

    Raises:
        ConfigError: if a target module is not in the model, or is an embedding that the plugin does not serve.
        PluginError: if the plugin cannot be built.
        CapacityError: if its slots take more memory than there is.
    """
    parts: Parts = context.parts
    planned, descriptor = parts.planned, parts.planned.lora
    assert descriptor is not None  # the plan has adapters
    model: AdaptableModel = parts.model  # type: ignore[assignment]  # its family declares `adapters`
    config = planned.loaded.config.lora
    linears, tables = _of_all_stages(parts, model)
    asked = target_modules(linears, tables, config.target_modules)
    modules = {path: sizes for path, sizes in asked.items() if path in model.linears or path in embeddings_of(model)}
    elsewhere = {path: sizes for path, sizes in asked.items() if path not in modules}
    embeddings = tuple(path for path in tables if path in asked)
    if embeddings and (refusal := descriptor.capabilities.embeddings.refusal(True)):
        raise ConfigError(
            f"lora.target_modules: lora plugin {descriptor.name!r} serves no embedding: {refusal}",
            fix=f"leave out {', '.join(map(_last, embeddings))}, or take another LoRA plugin",
        )
    offered = evolve(_context(planned, descriptor, model, modules, embeddings), elsewhere=elsewhere)
    if config.merge:
        return _merged(planned, descriptor, model, offered)
    return _in_slots(planned, descriptor, parts, model, offered)


def _merged(
    planned: Planned,
    descriptor: Descriptor[Any],
    model: AdaptableModel,
    context: LoraContext,
) -> MergedAdapter:
    modules = context.modules
    divided = [stage.device for stage in planned.stages.divided]
    return MergedAdapter(
        _plugin(planned, descriptor, context, model),
        model,
        modules,
        embeddings=_own_embeddings(context),
        max_tokens=context.max_tokens,
        device_of={path: divided[model.adapter_stages[path]] if divided else planned.device for path in modules},
        dtype=getattr(torch, planned.plan.dtype),
        named=planned.loaded.paths("lora.adapters"),
        shared=planned.connector is not None,
        notes=_notes(planned, descriptor),
    )


def _in_slots(
    planned: Planned,
    descriptor: Descriptor[Any],
    parts: Parts,
    model: AdaptableModel,
    context: LoraContext,
) -> AdapterSlots:
    config, single, extended = planned.loaded.config.lora, _serves_single(planned, descriptor), set[Names]()

    def extend(names: Names, rows: int, max_tokens: int, single_rows: int = 0) -> torch.Tensor | None:
        further = {"single_rows": single_rows} if single else {}
        room = model.extend(names, rows, max_tokens, **further)
        if room is not None:
            extended.add(names)
        return room

    extends = bool(descriptor.capabilities.extended.support) and hasattr(model, "extend")
    lora = _plugin(planned, descriptor, evolve(context, extend=extend if extends else None), model)
    steps = StepAdapters(
        lora,
        model,
        context.modules,
        embeddings=_own_embeddings(context),
        max_requests=parts.rows.max_requests,
        max_adapters=config.max_adapters,
        captured=partial(captured_for, descriptor, specialize=config.specialize_graphs, single=single),
        apply_merged=lora.apply_merged if context.merged else None,
        merged=context.merged,
        expand=lora.expand if extended else None,
        extended=extended,
        plan_single=lora.plan_single if single else None,
    )
    return AdapterSlots(
        lora,
        parts.rows,
        steps,
        max_adapters=config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
        named=planned.loaded.paths("lora.adapters"),
        shared=planned.connector is not None,
        notes=_notes(planned, descriptor),
    )


def _context(
    planned: Planned,
    descriptor: Descriptor[Any],
    model: AdaptableModel,
    modules: dict[str, tuple[int, int]],
    embeddings: Names,
) -> LoraContext:
    """Return the context of the plugin. Extra rows of the model's weights are not offered yet."""
    config, scheduler = planned.loaded.config.lora, planned.loaded.config.scheduler
    can_merge = bool(descriptor.capabilities.merged.support)
    # Uniform batches are captured for all requests, even if the budget lets fewer run.
    largest_batch = scheduler.max_requests * (1 + (planned.loaded.config.drafter.tokens if planned.drafter else 0))
    return LoraContext(
        contract=bind_contract(descriptor),
        modules=modules,
        merged=tuple(names for names in model.merged_linears if can_merge and set(names) <= modules.keys()),
        embeddings=embeddings,
        max_adapters=1 if config.merge else config.max_adapters,
        max_cpu_adapters=config.max_cpu_adapters,
        max_rank=config.max_rank,
        batch_invariant=planned.loaded.config.batch_invariant,
        max_tokens=max(scheduler.max_batched_tokens, largest_batch),
        device=planned.device,
        dtype=planned.plan.dtype,
        options=planned.options(descriptor),
        parts=_parts_of(planned, model, modules),
    )


def _parts_of(planned: Planned, model: AdaptableModel, modules: Mapping[str, Any]) -> dict[str, ModulePart]:
    """Return what a rank has of the modules that are divided."""
    if shard_of(planned.place) is None:
        return {}
    return {path: part for path, part in model.adapter_parts.items() if path in modules}


def _plugin(planned: Planned, descriptor: Descriptor[Any], context: LoraContext, model: AdaptableModel) -> Any:
    """Build the plugin, over pipeline stages one for each stage."""
    factory = planned.registry.factory(descriptor)

    def build(context: LoraContext) -> Any:
        return planned.registry.accept(descriptor, factory(context))

    divided = [stage.device for stage in planned.stages.divided]
    with (
        planned.registry.building(descriptor),
        oom_as_capacity_error(f"{label_of(descriptor)} with its slots", "lower lora.max_adapters or lora.max_rank"),
    ):
        return _staged(build, context, divided, model.adapter_stages) if divided else build(context)


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


def target_modules(linears: Sizes, embeddings: Sizes, asked: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return those of a model's linear layers and embeddings that may carry an adapter.

    Without names these are the linear layers except the output projection.

    Raises:
        ConfigError: naming the layers that the model has.
    """
    linears = {**linears, **embeddings}
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


def _of_all_stages(parts: Parts, model: AdaptableModel) -> tuple[Sizes, Sizes]:
    """Return the linear layers and the embeddings of a model, those of stages on other ranks with their whole sizes."""
    own = (dict(model.linears), dict(embeddings_of(model)))
    divided = {} if shard_of(parts.planned.place) is None else model.adapter_parts

    def whole(found: Sizes) -> Sizes:
        sizes = {path: (part.in_features, part.out_features) for path, part in divided.items() if path in found}
        return {**found, **sizes}

    stages = parts.of_stages(own)
    linears, embeddings = ({k: v for one in stages for k, v in one[place].items()} for place in (0, 1))
    return {**whole(linears), **own[0]}, {**whole(embeddings), **own[1]}


def _own_embeddings(context: LoraContext) -> Names:
    return tuple(path for path in context.embeddings if path in context.modules)


def embeddings_of(model: AdaptableModel) -> Mapping[str, tuple[int, int]]:
    """Return the embeddings that adapters can join. A family may declare none."""
    found: Mapping[str, tuple[int, int]] = getattr(model, "embeddings", {})
    return found


def _serves_single(planned: Planned, descriptor: Descriptor[Any]) -> bool:
    """Return True if plugin and model have a separate path for one adapter, and several may be loaded."""
    if planned.loaded.config.lora.max_adapters == 1:
        return False
    offer, family = descriptor.capabilities, planned.family_descriptor.capabilities
    return bool(offer.single.support and family.single_adapter.support)


def _notes(planned: Planned, descriptor: Descriptor[Any]) -> tuple[str, ...]:
    """Return the remarks on adapters that are shown with the plan."""
    config = planned.loaded.config.lora
    if config.merge:
        notes = [f"lora {descriptor.name}: one adapter at a time, added to the weights"]
    else:
        notes = [f"lora {descriptor.name}: {config.max_adapters} adapters of rank {config.max_rank} at most in a batch"]
        captured = captured_for(descriptor, 1, specialize=True)
        if planned.plan.graphs.resolved != "none" and captured == (AdapterUse.NONE,):
            notes.append(f"lora {descriptor.name}: its products cannot be captured, steps with adapters run eagerly")
    if planned.drafter is not None:
        notes.append(f"drafter {planned.drafter.name}: guesses without adapters; what it guesses is verified with them")
    return tuple(notes)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
