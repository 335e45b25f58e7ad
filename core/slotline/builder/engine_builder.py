"""From a plan to an engine: every factory is called here once, with its negotiated context."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial

from attrs import define, evolve, field

from slotline.builder.communicators import (
    Ranks,
    build_communicator,
    build_communicators,
    compare,
    fewest,
    gathered,
    over_stages,
)
from slotline.builder.device_checks import check_operations
from slotline.builder.extensions import build_extensions
from slotline.builder.freed_tokens import cache_maker
from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.graphs import build_graphs, num_spec_tokens
from slotline.builder.layer_groups import LayerGroupBuilder
from slotline.builder.model_weights import build_weights
from slotline.builder.nan_cause import nan_cause
from slotline.builder.parts import CacheMemory, Parts, StepParts
from slotline.builder.placement import device_memory, later_feeds
from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.builder.prefix_log import pool_of
from slotline.builder.request_services import (
    build_parser,
    build_pipeline,
    build_plain_draws,
    build_policy,
    build_processors,
    limits_of,
    load_tokenizer,
)
from slotline.builder.sampling_profile import warm_up
from slotline.builder.sizing import size_pool
from slotline.builder.warmup import Warmup
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.torch_device import compiler_of
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.engine.engine import Engine
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.block_table import tables_for
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.scheduler import Scheduler
from slotline.planner.compilation import compiler_backend
from slotline.planner.plan import Planned, make_plan
from slotline.planner.ranks import asked_shard
from slotline.registry.attribution import BuiltPlugins, names_plugins
from slotline.registry.built import MODEL, misfits_of
from slotline.registry.collection import frozen_objects
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import (
    Communicator,
    CompiledKernel,
    Device,
    KVSpec,
    Model,
    ModelContext,
)
from slotline.registry.contracts.prefix_groups import PrefixFinder
from slotline.registry.engine_reports import MemoryReport
from slotline.registry.errors import CapacityError
from slotline.registry.lean_start import lean_start
from slotline.registry.loading import bind_contract
from slotline.registry.output_checks import OutputChecks
from slotline.registry.ranks import ALONE

logger = logging.getLogger("slotline")

_CPU_PROFILE_TOKENS = 256
_SMALLER_STEPS = "lower scheduler.max_batched_tokens or scheduler.max_requests"


def build_engine(
    loaded: LoadedConfig,
    ranks: Ranks | None = None,
    engine_class: type[Engine] = Engine,
    planned: Planned | None = None,
) -> Engine:
    """Plan, load and allocate.

    Args:
        ranks: the ranks that build the engine together. None for this process alone.
        engine_class: the class of the engine.
        planned: the plan, if it is made already.

    Raises:
        SlotlineError: of the kind that fits.
    """
    startup = StepProfiler(enabled=True)
    with lean_start():
        with startup.scope("plan"):
            planned = planned or make_plan(loaded, place=ALONE if ranks is None else ranks.place)
        if ranks is not None:
            compare(ranks, planned)
        log_warnings(planned)
        with planned.hardware[planned.device].scope():
            engine = EngineBuilder(planned, startup, ranks, engine_class).build()
    logger.log(logging.WARNING if engine.plan.downgrades else logging.INFO, engine.plan.summary())
    logger.info("started in %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in startup.seconds.items()))
    return engine


def log_warnings(planned: Planned) -> None:
    """Log the warnings of the plugins and of the plan."""
    for warning in planned.registry.warnings:
        logger.warning(warning)
    for note in planned.plan.warnings:
        logger.warning("%s %s [%s]", note.code, note.text, note.key)


@define(eq=False)
class EngineBuilder:
    """Builds the parts of an engine in order. Each method makes one part.

    Attributes:
        planned: the plan with its descriptors and facts.
        startup: times the phases.
        ranks: the ranks that build the engine together. None for this process alone.
        engine_class: the class of the engine.
        kernels: those that building waited for.
        communicators: of the groups of ranks that this one is in, by dimension.
    """

    planned: Planned
    startup: StepProfiler = field(factory=lambda: StepProfiler(enabled=True))
    ranks: Ranks | None = None
    engine_class: type[Engine] = Engine
    kernels: list[CompiledKernel] = field(factory=list, init=False)
    communicators: dict[str, Communicator] = field(init=False)

    @communicators.default
    def _joined(self) -> dict[str, Communicator]:
        return build_communicators(self.planned, self.ranks)

    @property
    def groups(self) -> LayerGroupBuilder:
        """The builder of what serves the layers."""
        return LayerGroupBuilder(self.planned)

    @property
    def plugins(self) -> BuiltPlugins:
        """The objects that factories made so far."""
        return self.planned.registry.built

    @names_plugins
    def build(self, model: Model | None = None) -> Engine:
        """Build all parts and the engine that holds them.

        Args:
            model: the weights, as `load_model` of a builder with the same model, device and dtype made them.
        """
        compiler = compiler_of(self.planned.hardware[self.planned.device])
        if compiler is None:
            return self._build(model)
        outer = compiler.log_to(self.kernels)
        try:
            return self._build(model)
        finally:
            compiler.log_to(outer)

    def _build(self, model: Model | None) -> Engine:
        """Build the engine around a model, which is loaded first if it is None."""
        model = model or self.load_model()
        with frozen_objects() if self.planned.plan.graphs.any_captured else nullcontext():  # each capture collects
            return self._build_around(model)

    def _build_around(self, model: Model) -> Engine:
        """Build what a step runs through twice: over one block to measure memory, and over the caches that fit."""
        specs = self.groups.specs()
        parts = self._parts(model, specs)
        extensions = build_extensions(parts)
        layers = evolve(self.groups, shards=extensions.named.get("context_shards"))
        attention = layers.attention_groups(extensions.named.get("kv_scales"))
        known = len(self.kernels)
        null_block = layers.router(attention, specs, num_blocks=1, checks=OutputChecks(strict=True))
        step = self._step(evolve(parts, named=extensions.named, router=null_block))
        memory = self._measured(step, specs)
        built = evolve(parts, named=step.extensions.named)
        del step, extensions, null_block  # before the caches take the memory that is left
        with oom_as_capacity_error(f"a cache of {memory.num_blocks} blocks", "lower cache.memory"):
            apart = len(self.planned.shards.devices) > 1
            pages = {} if apart else layers.pages(specs, memory.num_blocks)
            router = layers.router(attention, specs, memory.num_blocks, pages, parts.checks)
            caches = CacheMemory(
                specs=layers.held(specs), pages=pages, pool=pool_of(self.planned, parts.groups, memory.num_blocks)
            )
            cascade = layers.prefix_finder(attention, built.named.get("cascade"))
            step = self._step(evolve(built, router=router, memory=caches), cascade, captures=True)
        self._prepare(step, known)
        engine = self._engine(step, caches.pool, memory, cascade)
        for ready in step.extensions.engine_ready:
            ready()
        self.planned.registry.hooks.engine_built(engine)
        return engine

    def _parts(self, model: Model, specs: list[KVSpec]) -> Parts:
        """Build what exists before the extensions."""
        planned, config = self.planned, self.planned.loaded.config
        what = f"a table of {config.scheduler.max_requests} requests of {planned.max_model_len} tokens"
        with oom_as_capacity_error(what, "lower scheduler.max_requests or scheduler.max_model_len"):
            rows = RequestTable(config.scheduler.max_requests, planned.max_model_len)
        tokenizer = load_tokenizer(planned)
        return Parts(
            planned=planned,
            model=model,
            rows=rows,
            groups=tuple(self.groups.cache_groups(specs, rows)),
            tokenizer=tokenizer,
            processors=tuple(build_processors(planned, rows, tokenizer)),
            profiler=StepProfiler(enabled=config.observability.profile),
            last_tokens=self._last_tokens(rows),
            stagings=tuple(transfer_buffer_for(planned.hardware[stage.device]) for stage in planned.stages.stages),
            named={},
            checks=OutputChecks(strict=False) if config.observability.check_integrity else None,
            context_group=build_communicator(planned, self.ranks, "decode_context", planned.shards.ranks),
            communicators=self.communicators,
            agree=fewest(self.ranks),
            gather=gathered(self.ranks),
            of_stages=over_stages(self.ranks),
        )

    def _step(self, parts: Parts, cascade: PrefixFinder | None = None, *, captures: bool = False) -> StepParts:
        """Build what a step runs through, over the caches of `parts.router`.

        Args:
            cascade: finds the prefixes that requests share, None for no finder.
            captures: whether graphs may be captured: not for a step that is measured.
        """
        extensions = build_extensions(parts)
        pipeline = build_pipeline(self.planned, parts.rows, parts.processors, extensions)
        gatherer = self._gatherer(parts, extensions)
        graphs = build_graphs(parts, gatherer, cascade, extensions) if captures else None
        runner = self._runner(parts, gatherer, pipeline, extensions, graphs)
        return StepParts(
            parts=parts, extensions=extensions, pipeline=pipeline, gatherer=gatherer, runner=runner, graphs=graphs
        )

    def _measured(self, step: StepParts, specs: list[KVSpec]) -> MemoryReport:
        """Measure the memory of the largest step, and return how it is divided."""
        first = Warmup(self.planned, step.gatherer, step.runner)
        first.listen()
        if self.planned.task == "generate":
            check_operations(self.planned)
        if first.compiler is not None:
            with self.startup.scope("compile"):
                first.compile_forwards()
        with self.startup.scope("profile"):
            return self._size(first, specs, step.extensions)

    def _prepare(self, step: StepParts, known: int) -> None:
        """Run what a first request meets, and capture graphs. `known` kernels were waited for before the profile."""
        progress = self.planned.loaded.config.observability.progress
        warmup = Warmup(self.planned, step.gatherer, step.runner)
        warmup.listen()
        with self.startup.scope("warm_up"):
            warmup.warm_up()
        # Where something was compiled, it is a first start, and captures and requests will compile more.
        if any(not kernel.on_disk for kernel in self.kernels[known:]):
            with self.startup.scope("compile"):
                warmup.compile_ahead(step.graphs)
        if step.graphs is not None:
            with self.startup.scope("capture"):
                step.graphs.capture(progress=progress)
                for capture in step.extensions.capture_graphs:
                    capture(step.graphs, progress=progress)
        warmup.listen()

    def _engine(self, step: StepParts, pool: BlockPool, memory: MemoryReport, cascade: PrefixFinder | None) -> Engine:
        planned, parts = self.planned, step.parts
        cache = cache_maker(parts.groups, parts.rows)(
            pool,
            parts.groups,
            prefix_caching=planned.plan.prefix_caching,
            prefix_unit=planned.plan.block_size,
            extensions=step.extensions,
        )
        return self.engine_class(
            plan=planned.plan,
            rows=parts.rows,
            scheduler=self._scheduler(parts.rows, cache, step.extensions),
            gatherer=step.gatherer,
            runner=step.runner,
            pipeline=step.pipeline,
            profiler=parts.profiler,
            limits=limits_of(planned, parts.tokenizer),
            sampling_defaults=planned.sampling_defaults,
            device=planned.device,
            eos_token_ids=planned.facts.eos_token_ids,
            tokenizer=parts.tokenizer,
            response_parser=build_parser(planned, parts.tokenizer),
            memory=memory,
            plugins=self.plugins,
            notes=parts.model.notes + step.extensions.notes,
            graphs=step.graphs,
            cascade=cascade,
            extensions=step.extensions,
            asynchronous=planned.asynchronous,
            turns=planned.turns,
            compiler=compiler_of(planned.hardware[planned.device]),
            check=planned.loaded.config.observability.check_integrity,
            startup=self.startup.seconds,
        )

    @names_plugins
    def load_model(self) -> Model:
        """Load the weights onto the device."""
        planned, config = self.planned, self.planned.loaded.config
        context = ModelContext(
            contract=bind_contract(planned.family_descriptor),
            facts=evolve(planned.facts, max_model_len=planned.max_model_len),
            device=planned.device,
            dtype=planned.plan.dtype,
            task=planned.task,
            optimize=config.optimize and not compiler_backend(config),
            offload_bytes=int(config.offload_gib * 2**30),
            batch_invariant=config.batch_invariant,
            stages=planned.stages.divided,
            captured=planned.plan.graphs.any_captured,
            load_format=planned.load_format,
            progress=config.observability.progress,
            options=self.planned.options(planned.family_descriptor),
            weights=build_weights(planned),
            shard=asked_shard(planned.loaded, planned.place),
            communicator=self.communicators.get("tensor", self.communicators.get("data")),
            replicas=self.communicators.get("data") if "tensor" in self.communicators else None,
            own_stage=planned.own_stage,
            with_embedding=planned.shares_embedding,
            compiler=compiler_backend(config),
        )
        fix = "take a smaller dtype, pipeline stages or a larger device, or set offload_gib"
        with (
            self.startup.scope("weights"),
            oom_as_capacity_error(f"the model of {planned.facts.num_parameters} parameters", fix),
        ):
            model = planned.family.load(context)
        planned.registry.fit(planned.family_descriptor, "what load() made", misfits_of(MODEL, context, model))
        return model

    def _gatherer(self, parts: Parts, extensions: Extensions) -> InputPreparer:
        planned, plan, groups, stagings = self.planned, self.planned.plan, parts.groups, parts.stagings
        device = planned.hardware[planned.stages.stages[0].device]
        kernel_sizes = [group.kernel_block_size for group in plan.cache_groups]
        tables = tables_for(groups, kernel_sizes, stagings[0], device, on_host=planned.on_host)
        return InputPreparer(
            parts.rows,
            groups,
            kernel_sizes,
            stagings[0],
            tables,
            planned.loaded.config.scheduler.max_batched_tokens,
            num_spec_tokens(planned),
            parts.last_tokens,
            later_feeds(plan, planned.stages, groups, stagings[1:], planned.hardware, on_host=planned.on_host),
            has_uncached=any(not group.cache_group for group in plan.groups),
            max_fixed_len=planned.facts.max_encoder_len,
            cuts_wanted=any(group.fast_prefill or group.last_queries for group in plan.groups),
            extensions=extensions,
        )

    def _runner(
        self,
        parts: Parts,
        gatherer: InputPreparer,
        pipeline: ProcessorPipeline,
        extensions: Extensions,
        graphs: GraphCapturer | None,
    ) -> ModelRunner:
        config = self.planned.loaded.config
        assert parts.router is not None
        return ModelRunner(
            parts.model,
            parts.router,
            parts.rows,
            pipeline,
            parts.stagings[-1],
            parts.profiler,
            parts.last_tokens,
            logprobs_mode=config.sampling.logprobs_mode,
            count_nans=config.observability.count_nans,
            mark=gatherer.assembler.mark,
            extensions=extensions,
            plain_draws=build_plain_draws(self.planned, parts.last_tokens, parts.stagings[-1]),
            ops=self.planned.hardware[self.planned.device].ops,
            graphs=graphs,
            nan_cause=partial(nan_cause, parts.router, extensions),
        )

    def _last_tokens(self, rows: RequestTable) -> PlaceholderTokens | None:
        """Build the table of tokens of a step in flight if steps are prepared before they are known, else None."""
        planned, device = self.planned, self.planned.stages.stages[0].device
        if not planned.asynchronous or planned.task != "generate":  # a pooled prompt gives no tokens
            return None
        ops = planned.hardware[device].ops
        return PlaceholderTokens(planned.facts.vocab_size, rows.max_requests, device, num_spec_tokens(planned), ops)

    def _size(self, first: Warmup, specs: list[KVSpec], extensions: Extensions) -> MemoryReport:
        config, plan = self.planned.loaded.config, self.planned.plan
        requests, most, runner = config.scheduler.max_requests, first.most_tokens, first.runner
        overlaps = bool(self.planned.device_capabilities.streams.support)
        tokens = most if overlaps else min(most, _CPU_PROFILE_TOKENS)

        def profile() -> float:
            self._profile(first, extensions, tokens, overlaps=overlaps)
            return most / tokens

        memory = config.cache.memory
        if self.planned.on_host and not isinstance(memory, str):
            memory /= config.parallel.data  # replicas share the host's
        held = [spec.max_blocks_held() for spec in specs]
        states = runner.extensions.named["states"].dispatcher if plan.states else None
        report = size_pool(
            memory,
            explicit=self.planned.loaded.origins["cache.memory"].kind != "default",
            devices=device_memory(
                self.planned.own_plan, self.planned.stages, specs, self.planned.shards, self.planned.hardware
            ),
            useful_blocks=max(requests * sum(held), 1),  # a pool has one block at least, be there nothing to hold
            profile=profile,
            state_bytes=states.slot_bytes * states.num_slots if states else 0,
            checkpoints=states.num_slots - requests if states else 0,
            hardware=None if self.planned.on_host else self.planned.hardware,
            agree=fewest(self.ranks),
        )
        if report.num_blocks - 1 < sum(held):
            raise CapacityError(
                f"the cache holds {report.num_blocks - 1} blocks and one request of max_model_len="
                f"{self.planned.max_model_len} tokens needs {sum(held)}",
                fix="lower scheduler.max_model_len or scheduler.max_batched_tokens, or raise cache.memory",
            )
        return report

    def _profile(self, first: Warmup, extensions: Extensions, tokens: int, *, overlaps: bool) -> None:
        """Run what takes most memory: extensions, a step of so many tokens, the drafter and the sampler.

        Args:
            overlaps: whether the device works on its own, and extensions and the sampler run at their largest too.
        """
        held = [profile() for profile in extensions.profile_memory] if overlaps else []
        inputs, runner = first.largest(tokens), first.runner
        count = len(inputs.rows)
        with oom_as_capacity_error(f"a step of {tokens} tokens of {count} requests", _SMALLER_STEPS):
            output = runner.run(inputs)
            del inputs
            for rehearse in runner.extensions.rehearse:
                rehearse(output)
        requests = self.planned.loaded.config.scheduler.max_requests
        most = (requests if overlaps else 1, self.planned.facts.vocab_size, self.planned.device)
        if extensions.output_head:
            getattr(runner.head, "rehearse", lambda *_: None)(*most)
        else:
            warm_up(*most, runner.ops)
        del held  # until here: what extensions keep lies beside a step

    def _scheduler(
        self,
        rows: RequestTable,
        cache: KVCacheManager,
        extensions: Extensions,
    ) -> Scheduler:
        config = self.planned.loaded.config
        return Scheduler(
            rows,
            cache,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            chunked_prefill=self.planned.chunked_prefill,
            default_seed=config.sampling.seed,
            lookahead=self.planned.lookahead,
            extensions=extensions,
            policy=build_policy(self.planned),
        )


def transfer_buffer_for(device: Device) -> TransferBuffer:
    """Return a new buffer for the copies of steps on a device."""
    return device.transfer_buffer()
