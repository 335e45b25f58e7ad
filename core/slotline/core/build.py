"""From a plan to an engine: every factory is called here, once, with exactly what was negotiated for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field

from slotline.core.adapter_source import AdapterSource
from slotline.core.adaptive import DraftControl
from slotline.core.admission import EngineLimits
from slotline.core.attention import AttentionGroup, AttentionRouter
from slotline.core.block_pool import BlockPool
from slotline.core.block_tables import tables_for
from slotline.core.build_adapters import adapter_notes, build_adapters, captured_for, load_named, shared_head
from slotline.core.cache_manager import CacheGroup, CacheManager
from slotline.core.cache_memory import allocate_caches, no_cache
from slotline.core.cache_specs import SpecBuilder, of_encoder
from slotline.core.cascade import Cascade, CascadeGroup
from slotline.core.checkpoints import Checkpoints
from slotline.core.device import device_scope
from slotline.core.draft_attention import DraftAttention
from slotline.core.draft_planning import draft_path, numbered
from slotline.core.drafting import Drafting
from slotline.core.encoding import Encoding, build_encoding
from slotline.core.engine import Engine
from slotline.core.graphs import GraphRunner, GraphShapes
from slotline.core.inputs import InputGatherer, even_split
from slotline.core.kv_scales import KVScaleTable
from slotline.core.last_tokens import LastTokens
from slotline.core.memory import DeviceMemory, MemoryReport, count_slots, size_pool
from slotline.core.placement import batches_of, device_memory, later_feeds
from slotline.core.planning import Planned, family_for, make_plan
from slotline.core.pooling import Pooling
from slotline.core.processors import ProcessorPipeline, ProcessorSlot
from slotline.core.profiling import StepProfiler
from slotline.core.rows import Rows
from slotline.core.runner import Runner
from slotline.core.sampler import warm_up
from slotline.core.scheduler import Scheduler
from slotline.core.staging import Staging, staging_for
from slotline.core.states import StateGroup, StateRouter, allocate
from slotline.core.structured_output import StructuredOutputs, build_structured_output
from slotline.core.tokenizer import Tokenizer
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import (
    AttentionContext,
    AttentionLayer,
    DrafterContext,
    KVSpec,
    LogitsProcessorContext,
    Model,
    ModelContext,
    StateContext,
    StructuredOutputContext,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import CapacityError, ContractError
from slotline.registry.loading import bind_contract, resolve_factory, resolve_options
from slotline.registry.negotiation import GroupPlan, StateGroupPlan

logger = logging.getLogger("slotline")

_PROCESSED = frozenset(
    {
        "allowed_token_ids",
        "bad_words_token_ids",
        "frequency_penalty",
        "logit_bias",
        "logits_processors",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
    }
)
"""Sampling parameters that only a logits processor can honour."""
_CPU_PROFILE_TOKENS = 256


def build_engine(loaded: LoadedConfig) -> Engine:
    """Plan, load and allocate.

    Raises:
        SlotlineError: of the kind that fits.
    """
    startup = StepProfiler(enabled=True)
    with startup.scope("plan"):
        planned = make_plan(loaded)
    for warning in planned.registry.warnings:
        logger.warning(warning)
    with device_scope(planned.device):
        engine = EngineBuilder(planned, startup).build()
    logger.log(logging.WARNING if engine.plan.downgrades else logging.INFO, engine.plan.summary())
    logger.info("started in %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in startup.seconds.items()))
    return engine


@define(eq=False)
class EngineBuilder:
    """Builds the parts of an engine in order; each method makes one part.

    Attributes:
        planned: what to build.
        startup: times the phases.
    """

    planned: Planned
    startup: StepProfiler = field(factory=lambda: StepProfiler(enabled=True))

    def build(self, model: Model | None = None) -> Engine:
        """All parts, and the engine around them.

        Args:
            model: the weights, as `load_model` of a builder with the same model, device and dtype made them.
        """
        planned, config = self.planned, self.planned.loaded.config
        model = model or self.load_model()
        specs = self._specs()
        rows = Rows(config.scheduler.max_requests, planned.max_model_len)
        groups = self._cache_groups(specs, rows)
        profiler = StepProfiler(enabled=config.observability.profile)
        pipeline = self._pipeline(rows)
        scales = self._kv_scales()
        attention = self._attention_groups(scales)
        cascade = self._cascade(attention, groups)
        drafting = self._drafting(rows, model)
        tokenizer = self._tokenizer()
        adapters = build_adapters(planned, model, rows)
        gatherer, runner = self._runner(model, rows, groups, attention, specs, pipeline, profiler, drafting, adapters)
        encoding = self._encoding(model)
        with self.startup.scope("profile"):
            memory = self._size(runner, gatherer, specs, encoding)
        self._set_router(runner, gatherer, self._router(attention, specs, memory.num_blocks))
        runner.grammars = self._grammars(rows, tokenizer)
        cache = CacheManager(
            BlockPool(memory.num_blocks),
            groups,
            prefix_caching=planned.plan.prefix_caching,
            prefix_unit=planned.plan.block_size,
            checkpoints=self._checkpoints(rows, runner.states),
        )
        engine = Engine(
            plan=planned.plan,
            rows=rows,
            scheduler=self._scheduler(rows, cache, encoding, adapters),
            gatherer=gatherer,
            runner=runner,
            pipeline=pipeline,
            profiler=profiler,
            drafting=drafting,
            pooling=runner.pooling,
            encoding=encoding,
            grammars=runner.grammars,
            limits=self._limits(tokenizer),
            device=planned.device,
            eos_token_ids=planned.facts.eos_token_ids,
            tokenizer=tokenizer,
            memory=memory,
            notes=model.notes + ((encoding.note,) if encoding else ()) + adapter_notes(planned),
            cascade=cascade,
            adapters=adapters,
            asynchronous=planned.asynchronous,
            check=config.observability.check_integrity,
            startup=self.startup.seconds,
        )
        with self.startup.scope("warm_up"):
            self._warm_up(engine)
        with self.startup.scope("capture"):
            engine.graphs = runner.graphs = self._graphs(engine)
        load_named(planned, adapters)
        runner.router.calculating = scales if scales is not None and scales.pending else None
        return engine

    def load_model(self) -> Model:
        """The weights, on the device."""
        planned, config = self.planned, self.planned.loaded.config
        context = ModelContext(
            contract=bind_contract(planned.family_descriptor),
            facts=evolve(planned.facts, max_model_len=planned.max_model_len),
            device=planned.device,
            dtype=planned.plan.dtype,
            task=planned.task,
            optimize=config.optimize,
            offload_bytes=int(config.offload_gib * 2**30),
            batch_invariant=config.batch_invariant,
            stages=planned.stages.divided,
            options=self._options(planned.family_descriptor),
        )
        with self.startup.scope("weights"):
            return planned.family.load(context)

    def _specs(self) -> list[KVSpec]:
        planned = self.planned
        builder = SpecBuilder(
            planned.loaded,
            planned.registry,
            planned.plan.kv_dtype,
            planned.max_model_len,
            planned.facts.max_encoder_len,
        )
        # Blocks are given back when a step's results are handed out; another may have been prepared by then.
        ahead = planned.loaded.config.scheduler.max_batched_tokens * (2 if planned.asynchronous else 1)
        return [
            builder.build(group, block_size=group.block_size, max_tokens_in_flight=ahead)
            for group in planned.plan.cache_groups
        ]

    def _cache_groups(self, specs: list[KVSpec], rows: Rows) -> list[CacheGroup]:
        return [
            CacheGroup(
                index,
                spec,
                group.block_size,
                group.kernel_block_size,
                rows.max_requests,
                *(
                    (self.planned.facts.max_encoder_len, rows.encoder_len)
                    if of_encoder(group.layers)
                    else (rows.max_model_len, None)
                ),
            )
            for index, (group, spec) in enumerate(zip(self.planned.plan.cache_groups, specs, strict=True))
        ]

    def _kv_scales(self) -> KVScaleTable | None:
        """The scales of an eight-bit cache; None where all are 1."""
        planned = self.planned
        source = {group.kv_scales for group in planned.plan.groups}
        if not source & {"checkpoint", "calculate"}:
            return None
        return KVScaleTable(
            planned.layers,
            planned.facts.kv_scales,
            device_of=planned.stages.device_of,
            dtype=getattr(torch, planned.plan.kv_dtype),
            calculate="calculate" in source,
        )

    def _cascade(self, attention: list[AttentionGroup], groups: list[CacheGroup]) -> Cascade:
        """Who is asked whether a common prefix pays."""
        found: list[CascadeGroup | None] = []
        read = batches_of(self.planned.plan, self.planned.stages)
        for index, cache in enumerate(groups):
            backends = tuple(g.backend for g in attention if g.cascade and read[g.batch][1] == index)
            size = self.planned.plan.cache_groups[index].kernel_block_size
            found.append(CascadeGroup(cache, size, backends) if backends else None)  # type: ignore[arg-type]
        return Cascade(found)

    def _attention_groups(self, scales: KVScaleTable | None) -> list[AttentionGroup]:
        """A built backend for each attention group of the plan; for each stage where several have layers of one."""
        return [
            self._attention_group(group, stage, layers, scales)
            for group in self.planned.plan.groups
            for stage, layers in self.planned.stages.split(group.layers)
        ]

    def _attention_group(
        self, group: GroupPlan, stage: int, layers: tuple[AttentionLayer, ...], scales: KVScaleTable | None
    ) -> AttentionGroup:
        plan, scheduler = self.planned.plan, self.planned.loaded.config.scheduler
        names = [cache_group.name for cache_group in plan.cache_groups]
        batches = batches_of(plan, self.planned.stages)
        descriptor = self.planned.registry.load(Kind.ATTENTION, group.backend, required=True)
        context = AttentionContext(
            contract=group.contract,
            layers=layers,
            device=self.planned.stages.stages[stage].device,
            dtype=group.dtype,
            kv_dtype=group.kv_dtype,
            block_size=group.block_size,
            kernel_block_size=group.kernel_block_size,
            layout=group.layout,
            max_query_len=group.max_query_len,
            max_requests=scheduler.max_requests,
            max_tokens=scheduler.max_batched_tokens,
            max_model_len=self.planned.facts.max_encoder_len if of_encoder(layers) else self.planned.max_model_len,
            kv_scales={layer.index: scales.by_layer[layer.index] for layer in layers} if scales else {},
            batch_invariant=self.planned.loaded.config.batch_invariant,
            options=self._options(descriptor),
        )
        with device_scope(context.device):
            backend = resolve_factory(descriptor)(context)
        return AttentionGroup(
            name=group.name,
            backend=backend,
            writes_cache=descriptor.capabilities.writes_cache,
            batch=batches.index((stage, names.index(group.cache_group))) if group.cache_group else len(batches),
            layers=layers,
            device=context.device,
            cascade=group.cascade != "none",
            cascade_captured=group.cascade == "captured",
            plain_writes=descriptor.capabilities.plain_writes,
        )

    def _router(self, attention: list[AttentionGroup], specs: list[KVSpec], num_blocks: int) -> AttentionRouter:
        """Allocate the caches and bind each layer to its own; layers that share one are bound to the same memory."""
        caches = allocate_caches(self.planned.plan, specs, num_blocks, self.planned.stages.device_of)
        for layer in self.planned.layers:
            if layer.shares_kv_with is not None:
                caches[layer.index] = caches[layer.shares_kv_with]
            elif layer.attention_type == "encoder_only":
                caches[layer.index] = no_cache(layer, self.planned.plan.dtype, self.planned.stages.device_of(layer))
        return AttentionRouter(attention, caches)

    def _set_router(self, runner: Runner, gatherer: InputGatherer, router: AttentionRouter) -> None:
        """Hand the caches to the model's layers, and to the drafter's own."""
        runner.router = router
        if runner.drafting is not None and self.planned.draft_layers:
            runner.drafting.attention = DraftAttention(
                router,
                self.planned.draft_layers,
                gatherer.groups,
                gatherer.kernel_block_sizes,
                max_model_len=self.planned.max_model_len,
                num_tokens=runner.drafting.num_tokens,
                device=self.planned.device,
            )

    def _states(self) -> StateRouter | None:
        """The state backends, and a slot for each row in every state layer; None where the model has no such layers.

        Raises:
            CapacityError: if that many states do not fit.
        """
        planned, scheduler = self.planned, self.planned.loaded.config.scheduler
        layers, memory = [layer for group in planned.plan.state_groups for layer in group.layers], planned.plan.states
        if memory is None:
            return None
        num_slots = count_slots(
            memory.slot_bytes,
            scheduler.max_requests,
            memory.checkpoints,
            planned.loaded.config.cache.memory,
            DeviceMemory(device=planned.device, total=planned.plan.device.total_memory, block=0),
            explicit=planned.loaded.origins["cache.memory"].kind != "default",
        )
        if planned.plan.prefix_caching and num_slots == scheduler.max_requests:
            logger.warning("no slots for checkpoints of states, so that no prefix is reused: see state.checkpoints")
        groups = []
        for group in planned.plan.state_groups:
            descriptor = planned.registry.load(Kind.STATE, group.backend, required=True)
            context = StateContext(
                contract=group.contract,
                layers=group.layers,
                device=planned.device,
                dtype=group.dtype,
                max_query_len=group.max_query_len,
                max_requests=scheduler.max_requests,
                max_tokens=scheduler.max_batched_tokens,
                max_draft_tokens=planned.loaded.config.drafter.tokens if planned.drafter else 0,
                options=self._options(descriptor),
            )
            groups.append(
                StateGroup(name=group.name, backend=resolve_factory(descriptor)(context), layers=group.layers)
            )
        states = {layer.index: allocate(layer, num_slots, planned.device) for layer in layers}
        return StateRouter(groups, states, num_slots, planned.device)

    def _checkpoints(self, rows: Rows, states: StateRouter | None) -> Checkpoints | None:
        """What is kept of states, where the model keeps any."""
        memory = self.planned.plan.states
        if states is None or memory is None:
            return None
        return Checkpoints(rows, states, memory.unit)

    def _runner(
        self,
        model: Model,
        rows: Rows,
        groups: list[CacheGroup],
        attention: list[AttentionGroup],
        specs: list[KVSpec],
        pipeline: ProcessorPipeline,
        profiler: StepProfiler,
        drafting: Drafting | None,
        adapters: AdapterSource | None,
    ) -> tuple[InputGatherer, Runner]:
        config, stages, plan = self.planned.loaded.config, self.planned.stages.stages, self.planned.plan
        vocab_size, budget = self.planned.facts.vocab_size, config.scheduler.max_batched_tokens
        kernel_sizes = [group.kernel_block_size for group in plan.cache_groups]
        stagings = [staging_for(stage.device) for stage in stages]
        tables = tables_for(groups, kernel_sizes, stagings[0], stages[0].device)
        later = later_feeds(plan, self.planned.stages, groups, stagings[1:])
        stands_in = self.planned.asynchronous and self.planned.task == "generate"  # a pooled prompt gives no tokens
        last_tokens = LastTokens(vocab_size, rows.max_requests, stages[0].device) if stands_in else None
        most_drafts = drafting.num_tokens if drafting else 0
        gatherer = InputGatherer(
            rows,
            groups,
            kernel_sizes,
            stagings[0],
            tables,
            budget,
            most_drafts,
            last_tokens,
            later,
            has_states=bool(plan.state_groups),
            lora_slots=config.lora.max_adapters if self._has_slots else 0,
            has_uncached=any(not group.cache_group for group in plan.groups),
            max_encoder_len=self.planned.facts.max_encoder_len,
        )
        runner = Runner(
            model,
            self._router(attention, specs, num_blocks=1),  # the null block alone, for profiling
            rows,
            pipeline,
            stagings[-1],
            profiler,
            drafting,
            last_tokens,
            self._pooling(model, rows, stagings[-1]),
            self._states(),
            adapters=adapters,
            logprobs_mode=config.sampling.logprobs_mode,
            count_nans=config.observability.count_nans,
            earlier=stagings[:-1],
        )
        self._set_router(runner, gatherer, runner.router)
        return gatherer, runner

    def _pooling(self, model: Model, rows: Rows, staging: Staging) -> Pooling | None:
        """What makes answers of hidden states, where the task is a pooling one."""
        task, hidden_size = self.planned.task, self.planned.facts.hidden_size
        if task == "generate":
            return None
        pooler = getattr(model, "pooler", None)
        if pooler is None:
            name = self.planned.family_descriptor.name
            raise ContractError(
                f"model family {name!r} offers the task {task!r}, and its model has no pooler",
                fix="tell the author of the plugin",
            )
        return Pooling(task, pooler, rows, staging, hidden_size=hidden_size, device=self.planned.device)

    def _encoding(self, model: Model) -> Encoding | None:
        """What inputs besides text need, where the model takes any."""
        if not self.planned.facts.modalities:
            return None
        config = self.planned.loaded.config
        return build_encoding(
            model,  # type: ignore[arg-type]  # a model with modalities is a MultimodalModel
            self.planned.facts,
            config.multimodal,
            device=self.planned.stages.stages[0].device,  # where the embeddings of tokens are
            max_batched_tokens=config.scheduler.max_batched_tokens,
            chunked_prefill=self.planned.chunked_prefill,
        )

    def _size(
        self, runner: Runner, gatherer: InputGatherer, specs: list[KVSpec], encoding: Encoding | None
    ) -> MemoryReport:
        config, plan, device = self.planned.loaded.config, self.planned.plan, self.planned.device
        budget, requests = config.scheduler.max_batched_tokens, config.scheduler.max_requests
        most = min(budget, requests * self.planned.max_model_len)  # a step holds no more, however large its budget
        tokens = most if device.startswith("cuda") else min(most, _CPU_PROFILE_TOKENS)

        def profile() -> float:
            on_cuda = device.startswith("cuda")
            held = encoding.profile() if encoding is not None and on_cuda else None
            lens = even_split(tokens, min(requests, tokens))
            inputs = gatherer.dummy(
                lens, vocab_size=self.planned.facts.vocab_size, adapters=self._has_slots, beginning=on_cuda
            )
            if encoding is not None and on_cuda:
                inputs.encoder_states = encoding.made_up_states(len(lens))
            output = runner.run(inputs)
            del inputs
            if runner.drafting is not None:
                runner.drafting.rehearse(output.computed)
            if runner.pooling is None:
                warm_up(requests if on_cuda else 1, self.planned.facts.vocab_size, device)
            del held
            return most / tokens

        held = [spec.max_blocks_held() for spec in specs]
        report = size_pool(
            config.cache.memory,
            explicit=self.planned.loaded.origins["cache.memory"].kind != "default",
            devices=device_memory(plan, self.planned.stages, specs),
            useful_blocks=max(requests * sum(held), 1),  # a pool has one block at least, be there nothing to hold
            profile=profile,
            state_bytes=plan.states.slot_bytes * runner.states.num_slots if plan.states and runner.states else 0,
            checkpoints=runner.states.num_slots - requests if runner.states else 0,
        )
        if report.num_blocks - 1 < sum(held):
            raise CapacityError(
                f"the cache holds {report.num_blocks - 1} blocks and one request of max_model_len="
                f"{self.planned.max_model_len} tokens needs {sum(held)}",
                fix="lower scheduler.max_model_len or scheduler.max_batched_tokens, or raise cache.memory",
            )
        return report

    def _scheduler(
        self, rows: Rows, cache: CacheManager, encoding: Encoding | None, adapters: AdapterSource | None
    ) -> Scheduler:
        config = self.planned.loaded.config
        return Scheduler(
            rows,
            cache,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            chunked_prefill=self.planned.chunked_prefill,
            default_seed=config.sampling.seed,
            encoder_cache=encoding.cache if encoding else None,
            lookahead=config.drafter.tokens if self.planned.draft_layers else 0,
            adapters=adapters,
        )

    def _pipeline(self, rows: Rows) -> ProcessorPipeline:
        facts, slots = self.planned.facts, []
        for descriptor in self.planned.processors:
            context = LogitsProcessorContext(
                contract=bind_contract(descriptor),
                vocab_size=facts.vocab_size,
                eos_token_ids=facts.eos_token_ids,
                max_requests=rows.max_requests,
                max_model_len=rows.max_model_len,
                device=self.planned.device,
                options=self._options(descriptor),
            )
            processor = resolve_factory(descriptor)(context)
            active = np.zeros(rows.max_requests, bool)
            slots.append(
                ProcessorSlot(
                    name=descriptor.name, processor=processor, capabilities=descriptor.capabilities, active=active
                )
            )
        return ProcessorPipeline(slots, rows, _PROCESSED)

    def _load_draft_model(self, path: Path) -> Model:
        """A whole model for a drafter, on the device, whose attention layers come behind the served model's."""
        planned, config = self.planned, self.planned.loaded.config
        descriptor, family = family_for(planned.registry, path)
        facts = family.inspect(path)
        layers = numbered(facts.layers, len(planned.facts.layers))
        return family.load(
            ModelContext(
                contract=bind_contract(descriptor),
                facts=evolve(facts, layers=layers, max_model_len=planned.max_model_len),
                device=planned.device,
                dtype=planned.plan.dtype,
                optimize=config.optimize,
                options=self._options(descriptor),
            )
        )

    def _drafting(self, rows: Rows, model: Model) -> Drafting | None:
        descriptor, facts = self.planned.drafter, self.planned.facts
        if descriptor is None:
            return None
        loaded = self.planned.loaded
        context = DrafterContext(
            contract=bind_contract(descriptor),
            num_tokens=loaded.config.drafter.tokens,
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            max_requests=rows.max_requests,
            max_model_len=rows.max_model_len,
            device=self.planned.device,
            dtype=self.planned.plan.dtype,
            path=draft_path(loaded, facts),
            facts=facts,
            compute_logits=shared_head(self.planned, model),
            embed=getattr(model, "embed", None),
            layers=self.planned.draft_layers,
            load_model=self._load_draft_model,
            options=self._options(descriptor),
        )
        return Drafting(
            resolve_factory(descriptor)(context),
            descriptor.capabilities,
            rows,
            num_tokens=context.num_tokens,
            vocab_size=facts.vocab_size,
            device=self.planned.device,
            control=self._draft_control(rows),
            trees=self.planned.trees,
            uniform=self._captures_verification,
        )

    def _draft_control(self, rows: Rows) -> DraftControl | None:
        """What chooses draft lengths, where the configuration wants that."""
        drafter = self.planned.loaded.config.drafter
        if not drafter.adaptive or self.planned.trees:
            return None
        return DraftControl(rows.max_requests, drafter.tokens, uniform=self._captures_verification)

    @property
    def _captures_verification(self) -> bool:
        """Whether there are graphs of batches in which all requests have as many drafts."""
        return dict(self.planned.plan.graphs.phases).get("verify", "none") != "none"

    def _grammars(self, rows: Rows, tokenizer: Tokenizer | None) -> StructuredOutputs | None:
        """Structured output, where there is a plugin and the model has what it takes; built when first asked for."""
        descriptor, facts = self.planned.structured_output.descriptor, self.planned.facts
        if descriptor is None or tokenizer is None or not self._eos_token_ids():
            return None
        context = StructuredOutputContext(
            contract=bind_contract(descriptor),
            tokenizer=tokenizer.transformers,
            vocab_size=facts.vocab_size,
            eos_token_ids=self._eos_token_ids(),
            max_requests=rows.max_requests,
            options=self._options(descriptor),
        )
        return build_structured_output(descriptor, context, rows, self.planned.loaded.config.structured_output)

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens that there is a logit for."""
        facts = self.planned.facts
        return tuple(token for token in facts.eos_token_ids if token < facts.vocab_size)

    def _limits(self, tokenizer: Tokenizer | None) -> EngineLimits:
        config = self.planned.loaded.config
        refusal = self.planned.structured_output.refusal
        if refusal is None and tokenizer is None:
            refusal = ("the model has no tokenizer", "name a folder with one under tokenizer")
        if refusal is None and not self._eos_token_ids():
            refusal = ("the model names no end-of-sequence token", "add eos_token_id to its generation_config.json")
        return EngineLimits(
            max_model_len=self.planned.max_model_len,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            max_logprobs=config.sampling.max_logprobs,
            vocab_size=self.planned.facts.vocab_size,
            chunked_prefill=self.planned.chunked_prefill,
            priorities=config.scheduler.policy == "priority",
            tasks=self.planned.facts.tasks,
            no_structured_output=refusal,
        )

    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer; a model folder without one serves token ids alone, a named one must load."""
        named = self.planned.loaded.path("tokenizer")
        path = named or self.planned.facts.path
        return Tokenizer(path) if named or any(path.glob("tokenizer*")) else None

    def _warm_up(self, engine: Engine) -> None:
        """Run the shapes that a first request meets, so that nothing is compiled or tuned while it waits."""
        longest = min(16, self.planned.max_model_len, self.planned.loaded.config.scheduler.max_batched_tokens)
        for adapters in (False, True)[: 1 + self._has_slots]:
            for query_lens in ([1], [longest]):
                engine.runner.run(engine.gatherer.dummy(query_lens, adapters=adapters))
        engine.profiler.reset()

    def _graphs(self, engine: Engine) -> GraphRunner | None:
        """The captured graphs, where the plan has any."""
        plan, config = self.planned.plan, self.planned.loaded.config
        phases = dict(plan.graphs.phases)
        if set(phases.values()) <= {"none"}:
            return None
        groups: tuple[GroupPlan | StateGroupPlan, ...] = (*plan.groups, *plan.state_groups)
        shapes = GraphShapes(
            phases,
            config.graphs.sizes,
            query_len=1 + (engine.drafting.num_tokens if engine.drafting else 0),
            max_requests=config.scheduler.max_requests,
            max_tokens=config.scheduler.max_batched_tokens,
            mixed_attention=any(group.captured("mixed") for group in groups),
            cascade=lambda requests, query_len: any(
                engine.cascade.longest(np.full(requests, query_len), self.planned.max_model_len)
            ),
            adapters=self._captured_adapters,
        )
        runner = engine.runner
        graphs = GraphRunner(
            runner.model,
            runner.router,
            engine.gatherer,
            plan,
            shapes,
            engine.cascade,
            runner.token_ids,
            runner.taps,
            runner.states,
            runner.adapters,
        )
        graphs.capture(progress=config.observability.progress)
        return graphs

    @property
    def _has_slots(self) -> bool:
        """Whether adapters stand beside the weights, so that a step may have any."""
        return self.planned.lora is not None and not self.planned.loaded.config.lora.merge

    def _captured_adapters(self, query_len: int) -> tuple[bool, ...]:
        """Whether batches of a query length are captured without and with adapters."""
        descriptor, config = self.planned.lora, self.planned.loaded.config.lora
        if descriptor is None or not self._has_slots:
            return (False,)
        return captured_for(descriptor, query_len, specialize=config.specialize_graphs)

    def _options(self, descriptor: Descriptor[Any]) -> Any:
        """The plugin's own table, typed by the plugin."""
        return self.planned.loaded.options(descriptor.kind, descriptor.name, resolve_options(descriptor))
