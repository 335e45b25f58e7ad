"""Captured graphs of a built engine."""

from __future__ import annotations

import numpy as np

from slotline.core.batch.graph_dispatcher import GraphDispatcher
from slotline.core.engine.engine import Engine
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.planner.plan import Planned
from slotline.registry.negotiation import GroupPlan, StateGroupPlan


def build_graphs(planned: Planned, engine: Engine) -> GraphRunner | None:
    """Build the graph runner if the plan captures graphs, else None. It captures nothing yet."""
    plan, config = planned.plan, planned.loaded.config
    if not plan.graphs.any_captured:
        return None
    groups: tuple[GroupPlan | StateGroupPlan, ...] = (*plan.groups, *plan.state_groups)
    shapes = GraphDispatcher(
        dict(plan.graphs.phases),
        config.graphs.sizes,
        query_len=1 + num_spec_tokens(planned),
        max_requests=config.scheduler.max_requests,
        max_tokens=config.scheduler.max_batched_tokens,
        mixed_attention=any(group.captured("mixed") for group in groups),
        cascade=lambda requests, query_len: any(
            engine.cascade.longest(np.full(requests, query_len), planned.max_model_len)
        ),
        variants=next(iter(engine.extensions.captured_variants), lambda query_len: (0,)),
    )
    runner = engine.runner
    return GraphRunner(
        runner.model,
        runner.router,
        engine.gatherer,
        plan,
        shapes,
        engine.cascade,
        runner.token_ids,
        engine.extensions,
        planned.hardware[planned.device],
        plans_anew=engine.extension("drafts") is not None,  # it attends after a replay, by the step's plans
    )


def num_spec_tokens(planned: Planned) -> int:
    """Return the most tokens after the known ones that a step verifies for a request."""
    return planned.loaded.config.drafter.tokens if planned.drafter is not None else 0
