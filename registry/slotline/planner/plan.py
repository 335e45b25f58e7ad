"""Planner: chooses model, device and plugins from a configuration, with reasons. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from slotline.planner.async_scheduling import choose_async, overlap_drafts
from slotline.planner.attention_edges import with_edges
from slotline.planner.block_events import hears_blocks
from slotline.planner.cache_specs import SpecBuilder, of_encoder, plan_pool
from slotline.planner.compilation import capture_refusal, choose_compilation
from slotline.planner.component_selection import (
    StructuredOutputChoice,
    choose_adaptive,
    choose_draft_graphs,
    choose_drafter,
    choose_processors,
    choose_structured_output,
    choose_task,
    choose_tree,
    choose_tree_graphs,
    refuse_variance,
)
from slotline.planner.context_parallel import ContextDevices, context_devices, for_shards, refuse_context, with_shards
from slotline.planner.dense_texts import without_idle_index
from slotline.planner.drafter import draft_layers, draft_length_setting
from slotline.planner.experts import PlacementChoice, choose_expert_placement
from slotline.planner.extensions import carriers, choose_extensions, extension_settings, refuse_extensions
from slotline.planner.fast_prefill import choose_fast_prefill, last_queries
from slotline.planner.freed_tokens import frees_tokens, score_needs
from slotline.planner.kv_connector import (
    choose_connector,
    connector_setting,
    loads_setting,
    refuse_connector,
    settle_layer_calls,
)
from slotline.planner.lora import choose_lora, refuse_lora_dtype
from slotline.planner.measurements import asked_cache, load_measurements
from slotline.planner.microbatches import choose_microbatches, refuse_single_plans, without_cascade
from slotline.planner.model_family import family_for, model_notes
from slotline.planner.non_chunkable import (
    length_of_whole_prompts,
    refuse_cache_dtype,
    refuse_sharing,
    whole_prompts,
)
from slotline.planner.offers import Offers, offers_of
from slotline.planner.pipeline_parallel import Stages, describe_devices, divide, pipeline_devices
from slotline.planner.pipeline_ranks import (
    own_stages,
    pipeline_setting,
    proposes_on_last,
    refuse_beside_stages,
    stages_of_ranks,
    turns_of,
    with_draft_layers,
)
from slotline.planner.prompt_embeds import choose_prompt_embeds
from slotline.planner.ranks import (
    CommunicatorChoice,
    choose_communicator,
    inspect_shard,
    layout_of,
    rank_device,
    refuse_beside_ranks,
    tensor_setting,
)
from slotline.planner.replicas import refuse_beside_replicas, refuse_few_devices, replicas_setting
from slotline.planner.response_parser import ResponseParserChoice, choose_response_parser, read_answer_facts
from slotline.planner.sampling_defaults import sampling_defaults
from slotline.planner.scheduler_policy import choose_scheduler_policy
from slotline.planner.single_file import unpacked
from slotline.planner.state_facts import refuse_unfit_states
from slotline.planner.state_specs import StateSpecBuilder, with_state_memory
from slotline.planner.text_only import choose_text_only, text_only_hint
from slotline.planner.video_pruning import choose_video_pruning
from slotline.planner.weight_source import find_source
from slotline.planner.weights import (
    WeightsChoice,
    choose_format,
    choose_weights,
    weights_capture_refusal,
    with_weights,
)
from slotline.planner.workspaces import with_workspaces
from slotline.registry.config import LoadedConfig
from slotline.registry.config.plugin_tables import options_path
from slotline.registry.config.tree import find
from slotline.registry.contracts import AttentionLayer, ModelFacts, ModelFamily, Stage
from slotline.registry.contracts.device import Device, DeviceCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.devices import Devices
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ModelError, NegotiationError
from slotline.registry.negotiation import (
    Asked,
    Part,
    Plan,
    attention_candidates,
    kv_spec_candidates,
    negotiate,
    prepare_request,
    review,
    state_candidates,
    with_measurements,
)
from slotline.registry.ranks import ALONE, Place

LONGEST_BY_DEFAULT = 8192
SMALL_MODEL = Path(next(iter(find_spec("slotline.core").submodule_search_locations))) / "small_model"  # type: ignore[union-attr,arg-type]
"""Folder of the model that ships with slotline, located without importing it."""


@frozen(kw_only=True, eq=False)
class Planned:
    """A plan and everything needed to build it.

    Attributes:
        loaded: the configuration.
        registry: the plugins.
        offers: descriptors of attention, cache and state plugins, as their probes left them.
        facts: the model's facts. With a tensor group those of this rank's part.
        whole: the facts of the whole model.
        task: the task that the engine runs, from `facts.tasks`.
        family_descriptor, family: the model family that loads the model.
        scheduler_policy: descriptor of the plugin that orders requests.
        processors: descriptors of the logits processors, in no order.
        drafter, lora, connector: descriptors of the drafter, the LoRA plugin and the KV connector, or None.
        extensions: descriptors of the step extensions that the configuration names, in their order.
        carriers: descriptors of the extensions that carry features of the plan.
        features: names of the plan's features, those that extensions provide included.
        draft_layers: the drafter's own attention layers, numbered behind the model's.
        structured_output: the plugin for it, or why there is none.
        response_parser: the plugin that reads answers, or why there is none.
        hardware: the devices, by torch device string.
        device_capabilities: the capabilities of the device plugin, the same for all devices.
        stages: placement of the parts of the model that this process has.
        rank_stages: the stages of all ranks. Empty if the layers are not divided among ranks.
        turns: steps with different requests that are under way at a time.
        shards: placement of a request's keys.
        max_model_len: longest sequence, in tokens.
        asynchronous: True if a step is prepared while the previous one runs.
        draft_form: how drafts are verified, as `DrafterContext.form`.
        captures_trees: True if steps that verify trees replay graphs, with a fixed number of nodes of each request.
        adaptive: True if the number of verified drafts adapts to what pays.
        captures_drafts: True if the drafter's own steps are captured.
        sampling_defaults: values for parameters that a request leaves out, by the names of `SamplingParams`.
        plan: the negotiated plan.
        weights: the plugins for quantized weights, None for plain weights.
        load_format: form that the weights are read in: ``hf``, ``sharded`` or ``dummy``.
        place: this process among the ranks of the engine.
        communicator: joins the ranks.
        expert_placement: places the experts that ranks share.
    """

    loaded: LoadedConfig
    registry: PluginRegistry
    offers: Offers
    facts: ModelFacts
    whole: ModelFacts
    task: str
    family_descriptor: Descriptor[Any]
    family: ModelFamily
    scheduler_policy: Descriptor[Any]
    processors: tuple[Descriptor[Any], ...]
    drafter: Descriptor[Any] | None
    draft_layers: tuple[AttentionLayer, ...]
    structured_output: StructuredOutputChoice
    response_parser: ResponseParserChoice
    lora: Descriptor[Any] | None
    connector: Descriptor[Any] | None
    hardware: Mapping[str, Device]
    device_capabilities: DeviceCapabilities
    extensions: tuple[Descriptor[Any], ...]
    carriers: tuple[Descriptor[Any], ...]
    features: frozenset[str]
    stages: Stages
    shards: ContextDevices
    max_model_len: int
    asynchronous: bool
    draft_form: str
    captures_trees: bool
    adaptive: bool
    captures_drafts: bool
    sampling_defaults: Mapping[str, Any]
    plan: Plan
    weights: WeightsChoice | None = None
    load_format: str = "hf"
    place: Place = ALONE
    communicator: CommunicatorChoice = CommunicatorChoice()
    expert_placement: PlacementChoice = PlacementChoice()
    rank_stages: tuple[Stage, ...] = ()
    turns: int = 1

    @property
    def own_stage(self) -> Stage | None:
        """Return the stage of this rank, None for a whole model."""
        return self.stages.stages[0] if self.rank_stages else None

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the end of the model, which gives logits."""
        return not self.rank_stages or self.place.index("pipeline") == len(self.rank_stages) - 1

    @property
    def lookahead(self) -> int:
        """Tokens after a step's own that a drafter with layers of its own stores keys of: its drafts, and a block's."""
        if self.drafter is None or not self.draft_layers:
            return 0
        own = 0 if self.drafter.capabilities.block_attention == "none" else 1
        return int(self.loaded.config.drafter.tokens) + own

    @property
    def proposes(self) -> bool:
        """Whether the drafter, if there is one, works in this process. It does not where the last rank proposes."""
        return self.is_last_stage or not proposes_on_last(self.drafter)

    @property
    def shares_embedding(self) -> bool:
        """Whether a drafter of this process may read the embedding, which another rank has."""
        return bool(self.rank_stages) and self.is_last_stage and proposes_on_last(self.drafter)

    @property
    def own_plan(self) -> Plan:
        """Return the plan whose cache groups have only the layers of this process, for their memory."""
        if not self.rank_stages:
            return self.plan
        groups = (evolve(group, layers=self.stages.own(group.layers)) for group in self.plan.cache_groups)
        return evolve(self.plan, cache_groups=tuple(groups))

    @property
    def device(self) -> str:
        """Return the torch device string of the last stage, on which logits are computed and tokens sampled."""
        return self.stages.stages[-1].device

    @property
    def on_host(self) -> bool:
        """Whether the devices compute in the host's memory."""
        return bool(self.device_capabilities.host_memory.support)

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Return all attention layers that the plan serves, by index: the model's, then the drafter's."""
        return self.facts.layers + self.draft_layers

    @property
    def all_extensions(self) -> tuple[Descriptor[Any], ...]:
        """Return the carriers of features and the named extensions, in the order in which a step calls them."""
        return tuple(sorted((*self.carriers, *self.extensions), key=lambda d: (d.capabilities.order, d.name)))

    def options(self, descriptor: Descriptor[Any]) -> Any:
        """Return a plugin's own table, typed by the plugin."""
        return self.registry.options(self.loaded, descriptor)

    def check_options(self) -> None:
        """Read the tables of all plugins of the plan and of other plugins that load.

        Reading the plan's tables ensures that a plan can be built. Reading the other tables finds mistakes that would
        otherwise appear only on another machine.

        Raises:
            ConfigError: for a wrong key or value.
        """
        backends = [self.offers[Kind.ATTENTION, group.backend] for group in self.plan.groups]
        states = [self.offers[Kind.STATE, group.backend] for group in self.plan.state_groups]
        caches = [self.offers[Kind.KV_SPEC, group.kv_spec] for group in self.plan.cache_groups]
        parts = (
            self.family_descriptor,
            self.drafter,
            self.structured_output.descriptor,
            self.response_parser.descriptor,
            self.scheduler_policy,
            self.lora,
            self.connector,
            self.expert_placement.descriptor,
        )
        for descriptor in (*backends, *states, *caches, *self.processors, *self.extensions, *filter(None, parts)):
            self.options(descriptor)
        self.registry.check_tables(self.loaded, required=False)

    @property
    def chunked_prefill(self) -> bool:
        """Return True if long prompts may be split over steps."""
        return self.loaded.config.scheduler.chunked_prefill and not whole_prompts(self.facts)


def make_plan(
    loaded: LoadedConfig, *, use_measurements: bool = True, weights: bool = True, place: Place | None = None
) -> Planned:
    """Discover the plugins, inspect the model and negotiate.

    Args:
        use_measurements: let measurements of `slotline tune` decide settings that the configuration leaves open.
        weights: False to plan without downloading the weights of a model on the Hub.
        place: this process among the ranks of the engine. None for rank 0 of those that the configuration asks for.

    Raises:
        SlotlineError: of the kind that fits. Nothing has been allocated then.
    """
    registry = PluginRegistry.discover(loaded)
    with registry.built.naming():
        place = place or Place(layout=layout_of(loaded))
        return _negotiated(loaded, registry, place, use_measurements=use_measurements, weights_wanted=weights)


def _negotiated(
    loaded: LoadedConfig, registry: PluginRegistry, place: Place, *, use_measurements: bool, weights_wanted: bool
) -> Planned:
    """Negotiate a plan with these plugins."""
    config = loaded.config
    _load_named(loaded, registry)
    there = Devices(registry, loaded)
    refuse_few_devices(loaded, there)
    alone = place.size == loaded.config.parallel.data == 1
    named = pipeline_devices(loaded, there) if alone else (rank_device(loaded, there, place),)
    shards = context_devices(loaded, there, named, place)
    hardware = {device.torch_device: device for device in (*there.made(), *named)}
    own = [hardware[device] for device in dict.fromkeys((*(d.torch_device for d in named), *shards.devices))]
    info = describe_devices(there, own)
    devices = tuple(device.torch_device for device in named)
    source = find_source(loaded, SMALL_MODEL, weights=weights_wanted)
    path = unpacked(registry, source.path)
    text_only = config.multimodal.text_only
    family_descriptor, family = family_for(registry, path, text_only=text_only)
    hint = partial(text_only_hint, registry, path, family_descriptor)
    source = source.of_family(family_descriptor, hint)
    weight_format = None
    if source.quantizable:
        weight_format = choose_format(loaded, registry, path, family_descriptor, saved=source.quantized, hint=hint)
    looked = source.look if weight_format is None else {"quantized": True, **source.look}
    whole = family.inspect(path, **looked)
    facts = inspect_shard(loaded, family, family_descriptor, whole, looked, place)
    without_encoders = choose_text_only(loaded, facts, family_descriptor)
    _refuse_windows(facts)
    refuse_unfit_states(facts.state_layers)
    refuse_variance(loaded, facts, family_descriptor)
    setting = choose_task(loaded, facts, family_descriptor)
    task = setting.resolved
    defaults = sampling_defaults(loaded, path, task)
    if place.layout.pipeline > 1:
        all_stages = stages_of_ranks(loaded, facts, family_descriptor, place)
        stages, rank_stages = own_stages(all_stages, place, devices[0]), all_stages.stages
    else:
        all_stages = stages = divide(loaded, devices, facts, family_descriptor)
        rank_stages = ()
    num_stages = len(all_stages.stages)
    max_model_len = _max_model_len(loaded, facts)
    if whole_prompts(facts):
        max_model_len = length_of_whole_prompts(loaded, max_model_len)
    facts = without_idle_index(facts, max_model_len)
    drafter = choose_drafter(loaded, registry, info, max_model_len, family_descriptor)
    fast_prefill = choose_fast_prefill(loaded, facts, family_descriptor, task=task, drafter=drafter, stages=num_stages)
    own_layers = draft_layers(
        loaded,
        registry,
        drafter,
        whole,
        max_model_len,
        lambda other: family_for(registry, other, "drafter.path", text_only=text_only)[1].inspect(other),
        divided=num_stages > 1 and not rank_stages,
    )
    stages = with_draft_layers(stages, len(own_layers), place)
    refuse_context(loaded, shards, facts, drafter, whole, place)
    refuse_beside_ranks(loaded, facts, place, source.format)
    refuse_beside_replicas(loaded)
    refuse_beside_stages(loaded, facts, drafter, place, form=source.format)
    sampled = task == "generate"
    processors = choose_processors(loaded, registry, info, drafting=drafter is not None) if sampled else ()
    grammars = choose_structured_output(loaded, registry, info, task)
    answers = read_answer_facts(facts.path, loaded.path("tokenizer"))
    parser = choose_response_parser(loaded, registry, info, task, answers)
    asynchronous = choose_async(loaded, there.descriptor(named[0]).capabilities, drafter)
    lora = choose_lora(loaded, registry, info, family_descriptor, stages=num_stages, ranks=place.layout.tensor)
    connector = choose_connector(loaded, registry, info)
    policy = choose_scheduler_policy(loaded, registry, info, place)
    extensions = choose_extensions(loaded, registry, info)
    microbatches = choose_microbatches(
        loaded, facts, task=task, drafter=drafter, lora=lora, stages=num_stages, family=family_descriptor
    )
    compilation = choose_compilation(
        loaded,
        facts,
        family_descriptor,
        place,
        drafter=drafter,
        lora=lora,
        fast_prefill=bool(fast_prefill.layers),
        stages=num_stages,
        form=source.format,
    )
    parts = (
        family_descriptor,
        *processors,
        *extensions,
        *filter(None, (drafter, grammars.descriptor, parser.descriptor, lora, connector, policy)),
    )
    turns = turns_of(place, drafter, has_states=bool(facts.state_layers))
    request = prepare_request(
        loaded,
        evolve(facts, layers=facts.layers + own_layers),
        info,
        max_model_len=max_model_len,
        dtype_fallbacks=_dtype_fallbacks(facts, info),
        draft_tokens=config.drafter.tokens if drafter else 0,
        fast_prefill=fast_prefill.layers,
        last_queries=last_queries(facts, task=task, drafter=drafter, stages=num_stages),
        needs=(*shards.needs(facts), *score_needs(loaded, registry, extensions)),
        parts=tuple(_part(registry, d, loaded) for d in parts),
        settings=(
            setting,
            *filter(None, (defaults.setting, source.setting)),
            asynchronous,
            grammars.setting,
            parser.setting,
            *fast_prefill.settings,
            *microbatches,
            *compilation,
            *(draft_length_setting(loaded, max_model_len) if drafter else ()),
            *choose_prompt_embeds(loaded, facts, family_descriptor, drafter),
            *choose_video_pruning(loaded, facts),
            *without_encoders,
            *tensor_setting(loaded, whole, facts, place),
            *replicas_setting(loaded),
            *pipeline_setting(loaded, rank_stages, turns),
            *connector_setting(loaded, registry, connector, place),
        ),
    )
    request = evolve(request, facts={**request.facts, **source.facts})
    request = for_shards(without_cascade(loaded, evolve(request, stages=rank_stages or stages.divided)), shards)
    if whole_prompts(facts):
        refuse_cache_dtype(loaded, facts)
        request = evolve(request, prefix_caching=refuse_sharing(loaded))
    attention, specs = attention_candidates(registry, info), kv_spec_candidates(registry, info)
    if use_measurements:
        measured = load_measurements(facts, info, request.dtype.value, asked_cache(request))
        request = with_measurements(request, measured, attention)
    states = state_candidates(registry, info) if facts.state_layers else ()
    rank = partial(registry.hooks.rank_candidates, device=info)
    plan = negotiate(request, attention, specs, states, rank)
    communicator = choose_communicator(loaded, registry, info, place, plan.dtype, states=bool(facts.state_layers))
    expert_placement = choose_expert_placement(loaded, registry, info, whole)
    weights = None
    if weight_format is not None:
        weights = choose_weights(loaded, registry, info, facts, weight_format, plan, stages.stages[-1].device, whole)
    if plan.graphs.resolved != "none" and (
        refusal := shards.graphs_refusal
        or communicator.graphs_refusal
        or capture_refusal(config)
        or _capture_refusal(family, facts, stages, plan, task)
        or weights_capture_refusal(weights)
    ):
        _refuse_explicit_graphs(request.graphs, refusal)
        if task == "generate":
            request = evolve(request, uncaptured=refusal)
        else:  # no downgrade: there is nothing to decode
            request = evolve(request, graphs=Asked("none", refusal))
        plan = negotiate(request, attention, specs, states, rank)
    offers = offers_of((*attention, *specs, *states))
    refuse_single_plans(loaded, plan, offers)
    plan = with_workspaces(plan, offers, loaded, max_model_len)
    products = None if weights is None else weights.descriptors
    plan = with_edges(plan, offers, config, request.needs, products, sharded=shards.divided)
    plan = with_shards(plan, loaded, shards)
    builder = SpecBuilder(loaded, registry, offers, plan.kv_dtype, max_model_len, facts.max_encoder_len)
    plan = plan_pool(plan, request, builder)
    held = StateSpecBuilder(loaded, registry, offers, max_model_len).build(plan)
    plan = with_state_memory(plan, held, config.scheduler.max_requests, config.state.checkpoints)
    tree = choose_tree(loaded, drafter, plan, offers, stages=num_stages)
    tree, captures_trees = choose_tree_graphs(loaded, tree, plan, offers)
    draft_graphs = choose_draft_graphs(loaded, drafter, plan, offers, own_layers)
    adaptive = choose_adaptive(loaded, drafter, tree)
    plan = evolve(plan, settings=(*plan.settings, *filter(None, (tree, adaptive, draft_graphs))))
    if drafter is not None:
        asynchronous = overlap_drafts(loaded, asynchronous, drafter, plan, offers, stages=num_stages)
        plan = evolve(plan, settings=tuple(asynchronous if s.key == asynchronous.key else s for s in plan.settings))
    has = {
        "adapters": lora is not None,
        "block_events": hears_blocks(plan, offers, extensions, shards),
        "async_scheduling": asynchronous.resolved == "true",
        "chunked_prefill": config.scheduler.chunked_prefill and not whole_prompts(facts),
        "drafts": drafter is not None,
        "graphs": plan.graphs.resolved != "none",
        "pipeline": num_stages > 1,
        "pipeline_ranks": bool(rank_stages),
        "pooling": not sampled,
        "prefix_caching": plan.prefix_caching,
        "states": bool(plan.state_groups),
        "context_shards": shards.divided,
        "guidance": any(one.capabilities.companions for one in processors),
        "cascade": any(group.cascade != "none" for group in plan.groups),
        "kv_scales": any(group.kv_scales in ("checkpoint", "calculate") for group in plan.groups),
        "kv_transfer": connector is not None,
        "microbatches": config.scheduler.microbatches > 1,
        "multimodal": bool(facts.modalities),
        "prefix_waits": plan.prefix_caching and bool(plan.groups) and config.cache.prefix_wait > 0,
        "prompt_embeds": config.prompt_embeds,
        "repeated_steps": asynchronous.resolved == "true" and sampled and drafter is None and num_stages == 1,
        "structured_output": grammars.descriptor is not None,
    }
    has["freed_tokens"] = frees_tokens(plan, facts, offers, extensions, has)
    features = refuse_extensions(registry, extensions, has)
    plan = evolve(plan, settings=(*plan.settings, *extension_settings(extensions)))
    if weights is not None:
        plan = with_weights(plan, loaded, registry, weights)
    if communicator.part is not None:
        plan = evolve(plan, settings=(*plan.settings, *communicator.settings)).with_parts(communicator.part)
    if expert_placement.part is not None:
        plan = evolve(plan, settings=(*plan.settings, *expert_placement.settings)).with_parts(expert_placement.part)
    connector, plan = settle_layer_calls(loaded, registry, connector, plan)
    plan = evolve(plan, inline_plugins=loaded.inline_files, notes=(*plan.notes, *model_notes(facts)))
    plan = review(plan, request, registry.hooks)
    refuse_lora_dtype(lora, plan.dtype)
    refuse_connector(loaded, registry, connector, plan)
    plan = evolve(plan, settings=(*plan.settings, *loads_setting(connector, plan)))
    _mark_selected(registry, plan)
    planned = Planned(
        loaded=loaded,
        registry=registry,
        offers=offers,
        facts=facts,
        whole=whole,
        task=task,
        family_descriptor=family_descriptor,
        family=family,
        scheduler_policy=policy,
        processors=processors,
        drafter=drafter,
        draft_layers=own_layers,
        structured_output=grammars,
        response_parser=parser,
        lora=lora,
        connector=connector,
        hardware=hardware,
        device_capabilities=there.descriptor(named[0]).capabilities,
        extensions=extensions,
        carriers=carriers(registry, has),
        features=features,
        stages=stages,
        shards=shards,
        max_model_len=max_model_len,
        asynchronous=asynchronous.resolved == "true",
        draft_form="chain" if tree is None else tree.resolved,
        captures_trees=captures_trees,
        adaptive=adaptive is not None and adaptive.resolved == "true",
        captures_drafts=draft_graphs is not None and draft_graphs.resolved == "true",
        sampling_defaults=defaults.values,
        plan=plan,
        weights=weights,
        load_format=source.format,
        place=place,
        communicator=communicator,
        expert_placement=expert_placement,
        rank_stages=rank_stages,
        turns=turns,
    )
    planned.check_options()
    return planned


def _refuse_windows(facts: ModelFacts) -> None:
    """Refuse a window or a chunk of less than one token, since a query always sees itself.

    Raises:
        ModelError: naming the layers.
    """
    for what in ("window", "chunk"):
        wrong = [layer for layer in facts.layers if (reach := getattr(layer, what)) is not None and reach < 1]
        if wrong:
            raise ModelError(
                f"attention layers {', '.join(layer.name for layer in wrong)} of {str(facts.path)!r} have a {what} of "
                f"{getattr(wrong[0], what)} tokens",
                fix=f"correct the checkpoint's config.json: a {what} counts the query itself; null is none",
            )


def _capture_refusal(family: ModelFamily, facts: ModelFacts, stages: Stages, plan: Plan, task: str) -> str | None:
    """Return the reason why nothing can be captured, or None."""
    if task != "generate":
        return f"task {task!r} runs prompts alone, and this version captures graphs for decoding"
    if stages.divided:
        return f"the model's forward cannot be captured: it runs over {len(stages.divided)} pipeline stages"
    if of_encoder(facts.layers):
        return "the keys of cross-attention come with the step in which a request begins, and a graph takes none"
    if not hasattr(family, "capture_refusal"):
        return "the model's forward cannot be captured: its model family does not say that it can"
    refusal = family.capture_refusal(facts, stages.stages[0].device, plan.dtype)
    return None if refusal is None else f"the model's forward cannot be captured: {refusal}"


def _refuse_explicit_graphs(asked: Asked[str], refusal: str) -> None:
    """Refuse graphs that were explicitly asked for.

    Raises:
        NegotiationError: with the reason why there can be none.
    """
    if asked.explicit and asked.value != "auto":
        raise NegotiationError(
            f"graphs.mode = {asked.value!r} ({asked.origin}): {refusal}",
            fix='set graphs.mode to "auto" or "none"',
        )


def _mark_selected(registry: PluginRegistry, plan: Plan) -> None:
    """Mark the plan's plugins as selected in the plugin list."""
    for group in plan.groups:
        registry.mark_selected(Kind.ATTENTION, group.backend)
    for state_group in plan.state_groups:
        registry.mark_selected(Kind.STATE, state_group.backend)
    for cache_group in plan.cache_groups:
        registry.mark_selected(Kind.KV_SPEC, cache_group.kv_spec)
    for state_cache in plan.state_caches:
        registry.mark_selected(Kind.KV_SPEC, state_cache.kv_spec)
    for part in plan.parts:
        registry.mark_selected(Kind(part.kind), part.name)


def _max_model_len(loaded: LoadedConfig, facts: ModelFacts) -> int:
    asked = loaded.config.scheduler.max_model_len
    if asked == "auto":
        lengths = (facts.max_model_len, LONGEST_BY_DEFAULT, facts.default_max_model_len)
        return min(length for length in lengths if length is not None)
    if asked > facts.max_model_len:
        raise NegotiationError(
            f"scheduler.max_model_len = {asked}, but the model's positions end at {facts.max_model_len}",
            fix=f"set scheduler.max_model_len = {facts.max_model_len} or less",
        )
    return asked


def _dtype_fallbacks(facts: ModelFacts, info: DeviceInfo) -> tuple[str, ...]:
    """Return the dtypes to try if none is configured: the checkpoint's first, unless this CPU cannot compute it."""
    if "cpu" in (info.type, *info.compatible_with) and (
        facts.dtype == "float16" or (facts.dtype == "bfloat16" and "avx512_bf16" not in info.features)
    ):
        return ("float32",)
    return (facts.dtype, "float32")


def _load_named(loaded: LoadedConfig, registry: PluginRegistry) -> None:
    """Load every backend and cache spec that the configuration names, so that a wrong or broken one stops the run."""
    for kind, named in (
        (Kind.ATTENTION, _names(loaded.config.attention.backend)),
        (Kind.STATE, _names(loaded.config.state.backend)),
        (Kind.KV_SPEC, loaded.config.cache.kv_spec.values()),
    ):
        for name in named:
            if name != "auto":
                registry.load(kind, name, required=True)


def _names(asked: str | tuple[str, ...] | Mapping[str, str]) -> list[str]:
    """Return every name in a choice of backends."""
    choices = list(asked.values()) if isinstance(asked, Mapping) else [asked]
    return [name for choice in choices for name in ([choice] if isinstance(choice, str) else choice)]


def _part(registry: PluginRegistry, descriptor: Descriptor[Any], loaded: LoadedConfig) -> Part:
    record = registry.record(descriptor.kind, descriptor.name)
    keys = {
        Kind.DRAFTER: "drafter.name",
        Kind.LORA: "lora.name",
        Kind.STRUCTURED_OUTPUT: "structured_output.backend",
        Kind.KV_CONNECTOR: "kv_connector.name",
        Kind.RESPONSE_PARSER: "response_parser.name",
        Kind.SCHEDULER_POLICY: "scheduler.policy",
    }
    key = keys.get(descriptor.kind, "")
    origin = loaded.origins.get(key)
    if descriptor.kind in (
        Kind.LOGITS_PROCESSOR,
        Kind.EXTENSION,
    ):  # named by its table, perhaps by the first key of one
        path = options_path(descriptor.kind, descriptor.name)
        table = find(loaded.tree, path)
        key, origin = ".".join(path), None if table is None else table.origin
    return Part(
        kind=descriptor.kind.value,
        name=descriptor.name,
        distribution=record.distribution,
        version=record.version,
        origin="default" if origin is None or origin.kind == "default" else f"{origin.where} {key}",
    )
