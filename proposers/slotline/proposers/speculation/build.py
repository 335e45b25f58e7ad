"""Construction of the drafter, with the parts of the served model that it uses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from slotline.builder.communicators import PIPELINE_HOST, HostLink
from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens, resolved
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.torch_device import clock_of
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.planner.drafter import draft_length, draft_path, numbered
from slotline.planner.model_family import family_for
from slotline.planner.pipeline_ranks import proposes_on_last
from slotline.planner.plan import Planned
from slotline.proposers.speculation.async_spec_decode import AsyncSpecDecode
from slotline.proposers.speculation.draft_attention import DraftAttention
from slotline.proposers.speculation.draft_length_controller import DraftLengthController
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.proposers.speculation.elsewhere import Elsewhere
from slotline.registry.contracts import Drafter, DrafterCapabilities, DrafterContext, Model, ModelContext
from slotline.registry.descriptor import Descriptor
from slotline.registry.loading import bind_contract
from slotline.registry.ranks import ALONE


def _load_draft_model(planned: Planned, path: Path) -> Model:
    """Load a whole draft model on the device, with its attention layers numbered after those of the served model."""
    config = planned.loaded.config
    descriptor, family = family_for(planned.registry, path, "drafter.path", text_only=config.multimodal.text_only)
    facts = family.inspect(path)
    layers = numbered(facts.layers, len(planned.facts.layers))
    return family.load(
        ModelContext(
            contract=bind_contract(descriptor),
            facts=evolve(facts, layers=layers, max_model_len=draft_length(planned.loaded, planned.max_model_len)),
            device=planned.device,
            dtype=planned.plan.dtype,
            optimize=config.optimize,
            options=planned.options(descriptor),
        )
    )


@frozen(eq=False)
class DraftRunnerBuilder:
    """Builder of the draft runner, without the caches and with them.

    Attributes:
        planned: the plan.
        rows: the request table.
        last_tokens: tokens of a step in flight. None without async scheduling.
        groups: block tables, by cache group.
        states: the extension that keeps states, None if no layer has any.
        context: of the drafter.
        drafter: the built plugin, or a stand-in where the last rank of a pipeline proposes.
        layer_ids: the layers whose inputs the drafter reads, on all ranks.
        link: to the other ranks of a pipeline whose last one proposes. None if this process proposes for itself.
    """

    planned: Planned
    rows: RequestTable
    last_tokens: PlaceholderTokens | None
    groups: tuple[CacheGroup, ...]
    states: Any
    context: DrafterContext
    drafter: Drafter
    layer_ids: tuple[int, ...] = ()
    link: HostLink | None = None

    @property
    def kernel_block_sizes(self) -> tuple[int, ...]:
        """The tokens of a kernel block, by cache group."""
        return tuple(group.kernel_block_size for group in self.planned.plan.cache_groups)

    @classmethod
    def of(cls, parts: Parts) -> DraftRunnerBuilder:
        """Build the planned drafter."""
        context = _context(parts)
        planned, fix = parts.planned, "take a smaller draft model, or lower scheduler.max_requests"
        descriptor = _descriptor(planned)
        drafter = parts.build(descriptor, context, fix) if planned.proposes else Elsewhere()
        layer_ids, link = tuple(getattr(drafter, "layer_ids", ())), None
        if planned.rank_stages and proposes_on_last(planned.drafter):
            layer_ids, link = parts.of_stages(layer_ids)[-1], HostLink(parts.communicators[PIPELINE_HOST])
        return cls(
            planned,
            parts.rows,
            parts.last_tokens,
            parts.groups,
            parts.named.get("states"),
            context,
            drafter,
            layer_ids=layer_ids if descriptor.capabilities.needs_layers else (),
            link=link,
        )

    @property
    def own_layer_ids(self) -> tuple[int, ...]:
        """Those of the layers whose inputs the drafter reads that this process has."""
        stage = self.planned.own_stage
        if stage is None:
            return self.layer_ids
        first = stage.first_layer
        end = stage.end_layer if not self.planned.is_last_stage else max((*self.layer_ids, first)) + 1  # wrong ones too
        return tuple(index for index in self.layer_ids if first <= index < end)

    def build(self, attention: DraftAttention | None = None) -> DraftRunner:
        """Build the runner, with the attention of the drafter's own layers if it has any."""
        planned, descriptor = self.planned, _descriptor(self.planned)
        return DraftRunner(
            self.drafter,
            descriptor.capabilities,
            self.rows,
            name=planned.registry.full_name(descriptor),
            num_tokens=self.context.num_tokens,
            max_len=draft_length(planned.loaded, planned.max_model_len),
            vocab_size=self.context.vocab_size,
            device=planned.device,
            control=_draft_control(planned, self.rows),
            form=planned.draft_form,
            uniform=_captures_verification(planned),
            check=planned.loaded.config.observability.check_integrity,
            embed=self.context.embed,
            time_point=clock_of(planned.hardware[planned.device]),
            attention=attention,
            place=planned.place if planned.place.layout.data == 1 else ALONE,  # replicas draft each for itself
            layer_ids=self.own_layer_ids,
            link=self.link,
        )

    def attention(self, router: AttentionDispatcher) -> DraftAttention | None:
        """Build the attention of the drafter's own layers. Return None if it has none."""
        planned = self.planned
        if not planned.draft_layers or not planned.proposes:
            return None
        return DraftAttention(
            router,
            planned.draft_layers,
            self.groups,
            self.kernel_block_sizes,
            max_model_len=planned.max_model_len,
            num_tokens=self.context.num_tokens,
            leads=_descriptor(planned).capabilities.catches_up,
            blocks=_descriptor(planned).capabilities.block_attention,
            device=planned.device,
            ops=planned.hardware[planned.device].ops,
        )

    def overlap(self, drafting: DraftRunner) -> AsyncSpecDecode:
        """Build the verification and the proposal on the device."""
        assert self.last_tokens is not None
        return AsyncSpecDecode(
            self.rows,
            drafting,
            self.last_tokens,
            self.planned.hardware[self.planned.device].transfer_buffer(),
            self.states,
            max_tokens=self.planned.loaded.config.scheduler.max_batched_tokens,
            vocab_size=self.planned.facts.vocab_size,
        )

    def token_ids(self, inputs: ModelInputs) -> torch.Tensor:
        """Return a step's tokens [num_padded_tokens] int64, those of a step in flight included."""
        return resolved(inputs.input_ids, self.last_tokens)


def _descriptor(planned: Planned) -> Descriptor[DrafterCapabilities]:
    assert planned.drafter is not None  # or there would be no extension for it
    return planned.drafter


def _context(parts: Parts) -> DrafterContext:
    planned, rows, model = parts.planned, parts.rows, parts.model
    loaded, facts, descriptor = planned.loaded, planned.whole, _descriptor(planned)
    embed = getattr(model, "embed", None)
    return DrafterContext(
        contract=bind_contract(descriptor),
        num_tokens=loaded.config.drafter.tokens,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_requests=rows.max_requests,
        max_model_len=rows.max_model_len,
        device=planned.device,
        dtype=planned.plan.dtype,
        path=draft_path(loaded, facts),
        facts=facts,
        compute_logits=parts.outside_steps(model.compute_logits),
        embed=None if embed is None else parts.outside_steps(embed),
        layers=planned.draft_layers,
        load_model=partial(_load_draft_model, planned),
        ops=planned.hardware[planned.device].ops,
        form=planned.draft_form,
        options=planned.options(descriptor),
    )


def _draft_control(planned: Planned, rows: RequestTable) -> DraftLengthController | None:
    """Build the controller of draft lengths if the plan adapts them, else None."""
    if not planned.adaptive:
        return None
    num_tokens = planned.loaded.config.drafter.tokens
    return DraftLengthController(rows.max_requests, num_tokens, uniform=_captures_verification(planned))


def _captures_verification(planned: Planned) -> bool:
    """Return whether graphs are captured for batches in which all requests have the same number of drafts."""
    captured = dict(planned.plan.graphs.phases).get("verify", "none") != "none"
    return captured and (planned.captures_trees or planned.draft_form == "chain")
