"""Computations at the edges of attention: which of them each group's backend takes over from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from slotline.registry.config import Config
from slotline.registry.contracts.attention_edges import EDGES, ROUNDED
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.negotiation import GroupPlan, Need, Plan
from slotline.registry.negotiation.reasons import Reason

CODE = "N186"


def with_edges(
    plan: Plan,
    offers: Mapping[tuple[Kind, str], Descriptor[Any]],
    config: Config,
    needs: Sequence[Need],
    weights: Mapping[tuple[str, str], Descriptor[Any]] | None,
    *,
    sharded: bool,
) -> Plan:
    """Return the plan with what each attention group's backend takes over, and a reason for what the model keeps.

    Args:
        needs: of plugins. One that reads attention scores is shown normed and rotated queries.
        weights: plugins that multiply by quantized weights, by slot and name, None for plain weights. If none takes
            rounded inputs, nothing is said of them.
        sharded: whether a request's cache is divided over devices.
    """
    kept, plugins = _kept(config, needs, sharded=sharded), (weights or {}).values()
    rounds = any(takes_rounded(one) for one in plugins)
    names = [name for name in EDGES if name != ROUNDED or rounds]
    groups = tuple(_with_edges(group, offers[Kind.ATTENTION, group.backend], kept, names) for group in plan.groups)
    return evolve(plan, groups=groups)


def takes_rounded(descriptor: Descriptor[Any]) -> bool:
    """Return True if a plugin's products take rounded inputs."""
    offer = getattr(descriptor.capabilities, "rounded_inputs", None)
    return offer is not None and offer.refusal(True) is None


def _kept(config: Config, needs: Sequence[Need], *, sharded: bool) -> str:
    """Return the reason why a model keeps all edges, "" without one."""
    if sharded:
        return "parallel.decode_context divides the keys of a request, and outputs are joined later"
    for need in needs:
        if need.capability == "scores":
            return f"{need.origin} reads scores of the queries that attention gets"
    if config.batch_invariant:
        return "batch_invariant = true: the model's own kernels are the ones shown to be invariant"
    if config.compile.mode != "none":
        return f"compile.mode = {config.compile.mode!r} compiles them into the forward pass"
    return "scheduler.microbatches: pieces of a step plan apart" if config.scheduler.microbatches > 1 else ""


def _with_edges(group: GroupPlan, descriptor: Descriptor[Any], kept: str, names: Sequence[str]) -> GroupPlan:
    offered = [name for name in names if any(name in layer.edges for layer in group.layers)]
    taken = descriptor.capabilities.edges
    left = [] if kept else [name for name in offered if taken.refusal(name) is None]
    others = [name for name in offered if name not in left]
    if not others:
        return evolve(group, edges=tuple(left))
    why = kept or f"{descriptor.name} does not take {'it' if len(others) == 1 else 'them'} over"
    reason = Reason(code=CODE, text=f"{', '.join(others)}: computed by the model, since {why}")
    return evolve(group, edges=tuple(left), kept_edges=(reason,))
