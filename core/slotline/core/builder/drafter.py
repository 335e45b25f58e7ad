"""Construction of the drafter, with the parts of the served model that it uses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attrs import evolve

from slotline.core.batch.request_table import RequestTable
from slotline.core.builder.parts import Parts
from slotline.core.builder.plugin_construction import build_plugin
from slotline.core.device.torch_device import clock_of
from slotline.core.speculation.draft_length_controller import DraftLengthController
from slotline.core.speculation.draft_runner import DraftRunner
from slotline.planner.drafter import draft_path, numbered
from slotline.planner.model_family import family_for
from slotline.planner.plan import Planned
from slotline.registry.contracts import (
    DrafterContext,
    Model,
    ModelContext,
)
from slotline.registry.loading import bind_contract


def _load_draft_model(planned: Planned, path: Path) -> Model:
    """Load a whole draft model on the device, with its attention layers numbered after those of the served model."""
    config = planned.loaded.config
    descriptor, family = family_for(planned.registry, path, "drafter.path")
    facts = family.inspect(path)
    layers = numbered(facts.layers, len(planned.facts.layers))
    return family.load(
        ModelContext(
            contract=bind_contract(descriptor),
            facts=evolve(facts, layers=layers, max_model_len=planned.max_model_len),
            device=planned.device,
            dtype=planned.plan.dtype,
            optimize=config.optimize,
            options=planned.options(descriptor),
        )
    )


def build_drafting(parts: Parts) -> DraftRunner | None:
    """Build the planned drafter for the rows of the request table. Return None if the plan has no drafter."""
    planned, rows, model = parts.planned, parts.rows, parts.model
    descriptor, facts = planned.drafter, planned.facts
    if descriptor is None:
        return None
    loaded, embed = planned.loaded, getattr(model, "embed", None)
    context = DrafterContext(
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
        options=planned.options(descriptor),
    )
    return DraftRunner(
        build_plugin(
            planned.registry, descriptor, context, "take a smaller draft model, or lower scheduler.max_requests"
        ),
        descriptor.capabilities,
        rows,
        name=planned.registry.full_name(descriptor),
        num_tokens=context.num_tokens,
        vocab_size=facts.vocab_size,
        device=planned.device,
        control=_draft_control(planned, rows),
        trees=planned.trees,
        uniform=_captures_verification(planned),
        check=loaded.config.observability.check_integrity,
        embed=context.embed,
        time_point=clock_of(planned.hardware[planned.device]),
    )


def _draft_control(planned: Planned, rows: RequestTable) -> DraftLengthController | None:
    """Build the controller of draft lengths if the plan adapts them, else None."""
    if not planned.adaptive:
        return None
    num_tokens = planned.loaded.config.drafter.tokens
    return DraftLengthController(rows.max_requests, num_tokens, uniform=_captures_verification(planned))


def _captures_verification(planned: Planned) -> bool:
    """Return whether graphs are captured for batches in which all requests have the same number of drafts."""
    return dict(planned.plan.graphs.phases).get("verify", "none") != "none"
