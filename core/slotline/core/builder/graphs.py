"""Captured graphs of a built engine."""

from __future__ import annotations

from functools import partial

import numpy as np

from slotline.core.batch.adapter_usage import AdapterUse
from slotline.core.batch.graph_dispatcher import GraphDispatcher
from slotline.core.builder.lora import captured_for, uses
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
        query_len=1 + (engine.drafting.num_tokens if engine.drafting else 0),
        max_requests=config.scheduler.max_requests,
        max_tokens=config.scheduler.max_batched_tokens,
        mixed_attention=any(group.captured("mixed") for group in groups),
        cascade=lambda requests, query_len: any(
            engine.cascade.longest(np.full(requests, query_len), planned.max_model_len)
        ),
        adapters=partial(_captured_adapters, planned),
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
        runner.taps,
        engine.extensions,
        runner.adapters,
        planned.hardware[planned.device],
    )


def _captured_adapters(planned: Planned, query_len: int) -> tuple[AdapterUse, ...]:
    """Return the uses of adapters for which batches of a query length are captured."""
    descriptor, possible = planned.lora, uses(planned)
    if descriptor is None or possible == (AdapterUse.NONE,):
        return (AdapterUse.NONE,)
    specialize = planned.loaded.config.lora.specialize_graphs
    return captured_for(descriptor, query_len, specialize=specialize, single=AdapterUse.ONE in possible)
