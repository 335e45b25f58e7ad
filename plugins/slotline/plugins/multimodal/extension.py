"""Extension of a model that takes inputs besides text: its items are encoded, cached and given to the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from slotline.builder.communicators import PIPELINE_HOST, HostLink
from slotline.builder.parts import Parts
from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.plugins.multimodal.embeds import StepEmbeds
from slotline.plugins.multimodal.encoder_cache import EncoderCache
from slotline.plugins.multimodal.encoder_runner import EncoderRunner
from slotline.plugins.multimodal.features import Feature, features_of, num_embeddings
from slotline.plugins.multimodal.first_rank import FirstRankEncoder
from slotline.plugins.multimodal.item_scheduler import ItemScheduler
from slotline.plugins.multimodal.keys_ahead import longest_run, with_keys_ahead
from slotline.plugins.multimodal.prompt_reader import PromptReader
from slotline.registry.contracts import ExtensionContext, MultimodalModel
from slotline.registry.errors import RequestError

if TYPE_CHECKING:
    from slotline.plugins.multimodal.raw_inputs import RawInputs

NAME = "multimodal"


class MultimodalExtension:
    """Items of requests, from the prompt to the forward pass.

    Attributes:
        reader: reads prompts.
        cache: counts the encoder outputs that are kept.
        items: cuts steps before items that cannot be encoded in them.
        encoder: encodes items and keeps their embeddings.
    """

    def __init__(self, parts: Parts) -> None:
        planned, scheduler = parts.planned, parts.planned.loaded.config.scheduler
        model: MultimodalModel = parts.model  # type: ignore[assignment]  # a model with modalities is one
        self.cache = _cache_of(parts, model)
        self.items = ItemScheduler(
            parts.rows,
            self.cache,
            max_batched_tokens=scheduler.max_batched_tokens,
            chunked_prefill=planned.chunked_prefill,
            looks_ahead=any(layer.keys_ahead for layer in planned.facts.layers),
        )
        device = planned.stages.stages[0].device  # that of the token embeddings
        queue = planned.hardware.get(device, planned.hardware[planned.device]).copy_stream()
        self.encoder = EncoderRunner(model, device, queue)
        if planned.rank_stages:
            link = HostLink(parts.communicators[PIPELINE_HOST], source=0)
            self.encoder = FirstRankEncoder(model, device, queue, link=link)
        self.prepare_request = self.items.prepare_request
        self.limit_tokens = self.items.limit_tokens
        self.limit_prompt = self.items.limit_prompt
        self.unschedule = self.items.unschedule
        config = planned.loaded.config.multimodal
        self.reader = PromptReader(model, planned.facts, config)
        self._most_encoded = int(self.cache.max_tokens_per_step / (1 - config.video_pruning_rate))  # before pruning
        self._profiler = parts.profiler
        self._features: tuple[tuple[int, Feature], ...] = ()  # of the step that is being prepared

    @property
    def notes(self) -> tuple[str, ...]:
        """The sizes, in words."""
        cache = self.cache
        return (f"encoder cache: {cache.capacity} embeddings, at most {cache.max_tokens_per_step} made in a step",)

    def validate(self, request: Request) -> None:
        """Refuse a request whose items do not fit, or whose placeholders have none.

        Raises:
            RequestError: with the sizes.
        """
        features = features_of(request)
        self.reader.validate(request.known_prompt, features)
        request.metrics.num_encoder_tokens = sum(f.size for f in features if f.modality == self.reader.prompt)
        needed, what = max((feature.size for feature in features), default=0), "an item"
        if not self.items.chunked_prefill:
            needed, what = sum({f.mm_hash: f.size for f in features}.values()), "a prompt that is not split"
        for name, limit in (
            ("cache_tokens", self.cache.capacity),
            ("max_tokens_per_step", self.cache.max_tokens_per_step),
        ):
            if needed > limit:
                raise RequestError(
                    f"{what} has {needed} embeddings, above multimodal.{name}={limit}",
                    fix=f"set multimodal.{name} = {needed} or more, or give smaller or fewer items",
                )
        if self.items.looks_ahead and (longest := longest_run(features)) > self.items.max_batched_tokens:
            raise RequestError(
                f"an item has {longest} tokens that see each other, so one step computes them, above "
                f"scheduler.max_batched_tokens={self.items.max_batched_tokens}",
                fix=f"set scheduler.max_batched_tokens = {longest} or more, or give smaller items",
            )

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Encode the items of a step. Requests whose items cannot be encoded fail and are left out."""
        scheduled, items = self.items.take(scheduled)
        with self._profiler.scope("encode"):
            failed = self.encoder.run(items)
        self._features = items.features
        return self._without(scheduled, failed) if failed else scheduled

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return a step's inputs with what was encoded for them."""
        features, self._features = self._features, ()
        if not features:
            return inputs
        if self.items.looks_ahead:
            inputs = with_keys_ahead(inputs, features)
        return evolve(inputs, extras={**inputs.extras, NAME: self.encoder.of_step(inputs, features)})

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass that begins with the embeddings of items in the place of placeholder tokens."""

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            found: StepEmbeds | None = inputs.extras.get(NAME)
            if found is not None and found.embeds is not None:
                with self._profiler.scope("forward"):
                    embeds = found.embeds.merged(self.encoder.model.embed, runner.token_ids(inputs))
                inputs = evolve(inputs, embeds=embeds)
            return forward(inputs, whole=whole)

        return compute

    def profile_memory(self) -> Any:
        """Encode as much as a step may. Return memory as large as a full cache."""
        what = "encoding as much as a step may"
        with oom_as_capacity_error(what, "lower multimodal.max_tokens_per_step or multimodal.cache_tokens"):
            return self.encoder.profile(self.cache.capacity, self._most_encoded)

    def reset(self) -> None:
        """Forget all embeddings. No request may hold any."""
        self.cache.reset()
        self.encoder.clear()

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget all embeddings, even those that requests hold. Requests that need them have them encoded again."""
        self.cache.restore()
        self.encoder.clear()
        self._features = ()

    def check(self) -> None:
        """Check the counts, and that the kept embeddings are those counted.

        Raises:
            IntegrityError: naming what does not fit.
        """
        self.items.check()
        self.encoder.check(self.cache.hashes)

    def _without(self, scheduled: SchedulerOutput, failed: Mapping[str, Exception]) -> SchedulerOutput:
        """Return a step without the requests whose items `failed`, by hash."""
        lost = {row: failed[f.mm_hash] for row, f in self._features if f.mm_hash in failed}
        requests = [(self.items.rows.request(row), error) for row, error in lost.items()]
        for request, _ in requests:
            self.cache.release(request)
        self.cache.forget(failed)
        self._features = tuple(one for one in self._features if one[0] not in lost)
        rest = scheduled.without(list(lost))
        return evolve(rest, failed=(*rest.failed, *requests), eager=bool(self._features))


class CrossAttentionExtension(MultimodalExtension):
    """Items of a model whose cross-attention stores keys of an encoder's states in a request's first step."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._fixed_group = next(i for i, group in enumerate(parts.groups) if group.fixed_len is not None)

    def gather(self, batch: InputBatchCPU, _upload: Any) -> StepEmbeds | None:
        """Return states for the keys that a made-up step stores. Real steps get theirs in `prepare_inputs`."""
        if not batch.made_up or not (count := len(batch.slots[self._fixed_group])):
            return None
        return StepEmbeds(None, self.encoder.made_up_states(count), lambda: None)

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, torch.Tensor]:
        """Return the states whose keys a step stores, if it has any."""
        found: StepEmbeds | None = inputs.extras.get(NAME)
        return {} if found is None or found.states is None else {"encoder_states": found.states}

    def capture_kwargs(self, inputs: ModelInputs, broken: frozenset[str], cut: Any) -> Mapping[str, Any]:
        """Return nothing: steps that store keys of an encoder run eagerly."""
        return {}


def build(context: ExtensionContext) -> MultimodalExtension | RawInputs:
    """Build the extension, with what else the model reads of a step."""
    parts: Parts = context.parts
    if any(modality.raw for modality in parts.planned.facts.modalities):
        from slotline.plugins.multimodal.raw_inputs import RawInputs

        return RawInputs(parts)
    if parts.planned.facts.position_axes > 1 or parts.planned.facts.layer_embeds:
        from slotline.plugins.multimodal.further_inputs import AxesExtension, LayersExtension

        return AxesExtension(parts) if parts.planned.facts.position_axes > 1 else LayersExtension(parts)
    crossing = any(group.fixed_len is not None for group in parts.groups)
    return CrossAttentionExtension(parts) if crossing else MultimodalExtension(parts)


def _cache_of(parts: Parts, model: MultimodalModel) -> EncoderCache:
    """Build the encoder cache in the sizes that the configuration sets."""
    facts, config = parts.planned.facts, parts.planned.loaded.config
    largest = max(num_embeddings(model.example(modality.name), modality) for modality in facts.modalities)
    asked = config.multimodal.max_tokens_per_step, config.multimodal.cache_tokens
    per_step = max(config.scheduler.max_batched_tokens, largest) if asked[0] == "auto" else asked[0]
    return EncoderCache(max(per_step, largest) if asked[1] == "auto" else asked[1], per_step)
