"""Captured graphs of an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.parts import Parts
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.planner.plan import Planned
from slotline.registry.contracts.prefix_groups import PrefixFinder
from slotline.registry.negotiation import GroupPlan, StateGroupPlan


def build_graphs(
    parts: Parts, gatherer: InputPreparer, cascade: PrefixFinder | None, extensions: Extensions
) -> GraphCapturer | None:
    """Build the graph runner if the plan captures graphs, else None. It captures nothing yet."""
    planned, router = parts.planned, parts.router
    plan, config = planned.plan, planned.loaded.config
    if router is None or not plan.graphs.any_captured:
        return None
    groups: tuple[GroupPlan | StateGroupPlan, ...] = (*plan.groups, *plan.state_groups)
    shapes = GraphDispatcher(
        dict(plan.graphs.phases),
        config.graphs.sizes,
        query_len=1 + num_spec_tokens(planned),
        max_requests=config.scheduler.max_requests,
        max_tokens=config.scheduler.max_batched_tokens,
        mixed_attention=any(group.captured("mixed") for group in groups),
        cascade=lambda requests, query_len: [] if cascade is None else _kinds(cascade, requests, query_len, planned),
        ranks=planned.place.layout.tensor if config.parallel.sequence else 1,
        variants=next(iter(extensions.captured_variants), lambda query_len: (0,)),
    )
    return GraphCapturer(
        parts.model if planned.place.layout.data == 1 else GatheringModel(parts.model),  # type: ignore[arg-type]
        router,
        gatherer,
        plan,
        shapes,
        cascade,
        parts.last_tokens,
        extensions,
        planned.hardware[planned.device],
        plans_anew="drafts" in extensions.named,  # it attends after a replay, by the step's plans
        has_logits=planned.is_last_stage,
    )


def _kinds(cascade: PrefixFinder, requests: int, query_len: int, planned: Planned) -> list[int]:
    """Return the kinds of prefixes that captured batches of equal requests may have."""
    lens = np.full(requests, query_len)
    return [kind for kind in (1, 2) if cascade.longest(lens, planned.max_model_len, kind) is not None]


class GatheringModel:
    """Model whose forward passes have as many tokens on each of the ranks that have tokens of their own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.compute_logits = model.compute_logits

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.Model.forward`."""
        self._model.gather_experts(gathers=True)
        try:
            hidden: torch.Tensor = self._model.forward(*args, **options)
        finally:
            self._model.gather_experts(gathers=False)
        return hidden


def num_spec_tokens(planned: Planned) -> int:
    """Return the most tokens after the known ones that a step verifies for a request."""
    return planned.loaded.config.drafter.tokens if planned.drafter is not None else 0
